"""The rate limiter: resources are neither lost nor lent twice, and turns follow the priorities."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.batching.rate_limiter import ANY_DEVICE, GLOBAL, RateLimiter, Resource, Seat
from penstock.engines.errors import InvalidRequestError

R, Q = (0, "R"), (0, "Q")


def entered(limiter: RateLimiter, *seats: Seat) -> RateLimiter:
    limiter.enter(seats)
    return limiter


def test_there_is_as_much_as_the_one_that_needs_most() -> None:
    large, small, other = Seat({R: 4}), Seat({R: 1}), Seat({R: 3})
    limiter = entered(RateLimiter(), large, small, other)
    assert limiter.acquire(other)
    assert limiter.acquire(small)
    assert not limiter.acquire(large)
    limiter.release(other)
    limiter.settle()
    assert not large.holds
    limiter.release(small)
    limiter.settle()
    assert large.holds
    assert not limiter.acquire(small)


def test_the_small_ones_do_not_overtake_a_large_one_forever() -> None:
    large, first, second = Seat({R: 2}), Seat({R: 1}), Seat({R: 1})
    limiter = entered(RateLimiter(), large, first, second)
    assert limiter.acquire(first)
    assert not limiter.acquire(large)
    assert not limiter.acquire(second)
    limiter.release(first)
    assert not limiter.acquire(first)
    assert large.holds


def test_one_that_needs_nothing_never_waits_nor_one_with_other_resources() -> None:
    limiter = entered(
        RateLimiter(), holder := Seat({R: 1}), waiting := Seat({R: 1}), none := Seat({}), q := Seat({Q: 1})
    )
    assert limiter.acquire(holder)
    assert not limiter.acquire(waiting)
    assert limiter.acquire(none)
    assert limiter.acquire(q)


def test_devices_have_their_own_and_global_ones_are_shared() -> None:
    mine, theirs = Seat({R: 1, (GLOBAL, "G"): 1}), Seat({(1, "R"): 1})
    both = Seat({(GLOBAL, "G"): 1})
    limiter = entered(RateLimiter(), mine, theirs, both)
    assert limiter.acquire(mine)
    assert limiter.acquire(theirs)
    assert not limiter.acquire(both)


@pytest.mark.parametrize(
    ("amounts", "needs", "most"),
    [
        ({(ANY_DEVICE, "R"): 3}, {R: 4}, 3),
        ({(ANY_DEVICE, "Q"): 9}, {R: 4}, 0),
        ({(1, "R"): 9}, {R: 4}, 0),
        ({(0, "R"): 2, (ANY_DEVICE, "R"): 3}, {R: 4}, 3),
        ({(0, "R"): 2, (ANY_DEVICE, "R"): 3}, {(GLOBAL, "R"): 4}, 3),
    ],
)
def test_a_model_that_asks_for_more_than_there_is_is_refused(
    amounts: dict[Resource, int], needs: dict[Resource, int], most: int
) -> None:
    limiter = RateLimiter(amounts)
    with pytest.raises(InvalidRequestError) as refused:
        limiter.enter([Seat(needs)])
    assert refused.value.message == (
        f'Resource count for "R" is limited to {most} which will prevent scheduling of one or more model instances, '
        "the minimum required count is 4"
    )
    if most:
        limiter.enter([Seat(dict.fromkeys(needs, most))])  # the refused one has left nothing behind


def test_a_resource_is_global_or_not() -> None:
    limiter = entered(RateLimiter(), Seat({(GLOBAL, "R"): 1}))
    with pytest.raises(InvalidRequestError, match=r'^Resource "R" is present as both global and device-specific'):
        limiter.enter([Seat({R: 1})])


def test_a_model_that_leaves_frees_what_it_held_and_those_that_wait_are_woken() -> None:
    woken: list[str] = []
    limiter = entered(RateLimiter(), holder := Seat({R: 1}))
    limiter.enter([waiting := Seat({R: 1}, wake=lambda: woken.append("waiting"))])
    assert limiter.acquire(holder)
    assert not limiter.acquire(waiting)
    limiter.leave([holder])
    assert woken == ["waiting"]
    assert waiting.holds


def order(priorities: list[int], turns: int) -> list[int]:
    """Who is served, of instances that always have a batch and need the whole resource."""
    limiter = RateLimiter()
    seats = [Seat({R: 1}, priority) for priority in priorities]
    limiter.enter(seats)
    served = []
    for seat in seats:
        limiter.acquire(seat)
    for _ in range(turns):
        [number] = [number for number, seat in enumerate(seats) if seat.holds]
        served.append(number)
        limiter.release(seats[number])
        limiter.acquire(seats[number])
    return served


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 60))
def test_turns_follow_the_priorities(priorities: list[int], turns: int) -> None:
    found = Counter(order(priorities, turns))
    done = [found[number] * priority for number, priority in enumerate(priorities)]
    assert max(done) - min(done) <= max(priorities)


def test_priority_two_has_every_third_turn_after_two_of_priority_one() -> None:
    """As in Triton 2.51, also where the one with priority 2 comes first."""
    assert order([1, 2], 30) == [0, 0, 1] * 10
    assert order([2, 1], 30) == [0, 1, 1, *([1, 1, 0] * 9)]


def test_equal_priorities_take_turns() -> None:
    assert order([3, 3, 3], 9) == [0, 1, 2] * 3


def test_one_that_was_idle_does_not_make_up_for_it() -> None:
    limiter = entered(RateLimiter(), busy := Seat({R: 1}), idle := Seat({R: 1}))
    for _ in range(100):
        assert limiter.acquire(busy)
        limiter.release(busy)
    assert limiter.acquire(idle)
    assert not limiter.acquire(busy)
    turns = []
    for _ in range(6):
        served = busy if busy.holds else idle
        turns.append(served is busy)
        limiter.release(served)
        limiter.acquire(served)
    assert 2 <= sum(turns) <= 4


NEEDS = st.dictionaries(st.sampled_from([(0, "R"), (0, "Q"), (1, "R"), (GLOBAL, "G")]), st.integers(1, 4), max_size=3)


@given(st.lists(st.tuples(NEEDS, st.integers(1, 4)), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_nothing_is_lent_twice_and_everyone_is_served(
    instances: list[tuple[dict[Resource, int], int]], chance: random.Random
) -> None:
    """Instances come, go idle, end their batches and leave, all in any order."""
    seats = [Seat(needs, priority) for needs, priority in instances]
    present: list[Seat] = []
    limiter = RateLimiter()
    passed: Counter[Seat] = Counter()
    for _ in range(100):
        seat = chance.choice(seats)
        before = {one for one in present if one.holds}
        if seat not in present:
            limiter.enter([seat])
            present.append(seat)
        elif seat.holds and seat.needs:
            chance.choice([limiter.release, limiter.release, limiter.decline])(seat)
            if chance.random() < 0.8:
                limiter.acquire(seat)
            limiter.settle()
        elif chance.random() < 0.05:
            limiter.leave([seat])
            present.remove(seat)
        elif chance.random() < 0.05:
            limiter.decline(seat)
            limiter.settle()
        else:
            limiter.acquire(seat)
        check(limiter, present, before)
        passed = overtaken(passed, present, before)
        # Of each other instance it may have to wait for the turns that are due to it, and what has begun already.
        assert all(count <= 6 * len(seats) for count in passed.values())
    limiter.leave(list(present))
    assert limiter.held == {}


def check(limiter: RateLimiter, present: list[Seat], before: set[Seat]) -> None:
    held: Counter[Resource] = Counter()
    for seat in present:
        assert not (seat.holds and seat.waits)
        held.update(seat.needs if seat.holds else {})
    assert limiter.held == held
    most: dict[Resource, int] = {}
    for seat in present:
        most |= {resource: max(count, most.get(resource, 0)) for resource, count in seat.needs.items()}
    for seat in present:
        if seat.holds and seat not in before:
            assert all(held[resource] <= most[resource] for resource in seat.needs)
    # Nobody waits for nothing: the resources of someone who waits are too few, or kept for another one that waits.
    waiting = [seat for seat in present if seat.waits]
    fit = [seat for seat in waiting if all(held[one] + count <= most[one] for one, count in seat.needs.items())]
    assert not waiting or len(fit) < len(waiting)


def overtaken(passed: Counter[Seat], present: list[Seat], before: set[Seat]) -> Counter[Seat]:
    """How often others have got a resource that a waiting one needs, since it began to wait."""
    served = [seat for seat in present if seat.holds and seat not in before]
    return Counter(
        {
            seat: passed[seat] + sum(1 for one in served if not seat.needs.keys().isdisjoint(one.needs))
            for seat in present
            if seat.waits
        }
    )
