"""Requests in the background, under every policy: they compute in idle steps alone, and make room."""

from __future__ import annotations

import pytest

from penstock.engines.scheduler.queues import Policy
from unit.engines.scheduler.harness import Rig, make_rig

POLICIES = pytest.mark.parametrize("policy", list(Policy))


def computed_together(rig: Rig, background: set[int]) -> list[set[int]]:
    """Of each step, the ids in the background, where there are others as well."""
    steps = [set(step.request_ids) for step in rig.runner.steps]
    return [ids & background for ids in steps if ids & background and ids - background]


@POLICIES
def test_they_wait_while_others_run_and_go_on_behind_them(policy: Policy) -> None:
    rig = make_rig(policy=policy)
    slow = rig.request([0], max_tokens=6, background=True, tenant="a", priority=-9)
    rig.step(slow)
    rig.step()
    urgent = rig.request([1], max_tokens=3, tenant="b", priority=9)
    rig.run(urgent)
    ids = [step.request_ids for step in rig.runner.steps]
    assert ids == [[1], [1], [2], [2], [2], [1], [1], [1], [1]]
    assert rig.scheduler.stats().preemptions == 0, "it kept its seat"


@POLICIES
def test_whatever_came_first_others_are_admitted_before_them(policy: Policy) -> None:
    rig = make_rig(max_num_seqs=1, policy=policy)
    rig.run(
        rig.request([0], max_tokens=1, background=True, arrival_time=rig.clock.now - 1e6),
        rig.request([1], max_tokens=1, background=True, arrival_time=rig.clock.now - 1e5),
        rig.request([2], max_tokens=1),
    )
    assert [step.request_ids for step in rig.runner.steps] == [[3], [1], [2]]


@POLICIES
@pytest.mark.parametrize("depth", [1, 2])
def test_seats_are_given_up(policy: Policy, depth: int) -> None:
    rig = make_rig(max_num_seqs=2, policy=policy, steps_in_flight=depth)
    rig.step(*[rig.request([n], max_tokens=9, background=True) for n in range(2)])
    rig.step()
    rig.run(*[rig.request([n], max_tokens=3) for n in (2, 3)])
    assert set(rig.ended) == {1, 2, 3, 4}
    assert list(rig.ended)[:2] == [3, 4]
    assert not computed_together(rig, {1, 2})
    assert rig.scheduler.stats().preemptions == 2


@POLICIES
def test_blocks_are_given_up_as_far_as_they_are_needed(policy: Policy) -> None:
    rig = make_rig(7, 4, policy=policy)
    rig.step(*[rig.request([n] * 8, max_tokens=4, background=True) for n in range(2)])
    rig.run(rig.request([5] * 12, max_tokens=4))
    assert next(iter(rig.ended)) == 3
    assert rig.scheduler.stats().preemptions == 1, "the second of them was enough"
    assert not computed_together(rig, {1, 2})


def test_under_fair_what_tenants_do_in_the_background_is_not_held_against_them() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.FAIR)
    rig.run(rig.request([0], max_tokens=30, background=True, tenant="a"))
    rig.step(rig.request([0], max_tokens=2, tenant="b"))
    rig.run(rig.request([0], max_tokens=1, tenant="b"), rig.request([0], max_tokens=1, tenant="a"))
    assert list(rig.ended) == [1, 2, 4, 3]


@POLICIES
def test_who_has_given_up_its_seat_often_still_computes_beside_others(policy: Policy) -> None:
    """Blocks were never short: it need not leave more and more of them free."""
    rig = make_rig(64, 4, max_num_seqs=2, policy=policy)
    rig.step(*[rig.request([n], max_tokens=100, background=True) for n in range(2)])
    for n in range(8):
        rig.step(rig.request([2, n], max_tokens=1))
        rig.step()
    assert rig.scheduler.stats().preemptions == 8
    assert set(rig.last.request_ids) == {1, 2}
