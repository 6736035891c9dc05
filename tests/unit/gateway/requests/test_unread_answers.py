"""Who is closed when too much waits to be read, and what a connection's requests hold of the server's memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.errors import OverloadedError
from penstock.gateway.requests.intake import SMALL_BODY, BodyBudget, ConnectionShare, UnreadAnswers

MIB = 1 << 20


class Client:
    def __init__(self, unread: UnreadAnswers, seconds: float = 0.0) -> None:
        self._unread = unread
        self.seconds_to_read = seconds
        self.closed = False

    def abort(self) -> None:
        self.closed = True
        self._unread.note(self, 0)


def test_those_that_would_take_longest_are_closed() -> None:
    unread = UnreadAnswers(100 * MIB)
    fast, slow = Client(unread, seconds=2), [Client(unread, seconds=200 + number) for number in range(50)]
    for client in slow:
        unread.note(client, MIB)
    unread.note(fast, 60 * MIB)
    assert not fast.closed
    assert [client.closed for client in slow] == [False] * 27 + [True] * 23, "until an eighth is free"
    assert unread.held == 87 * MIB
    assert unread.closed == 23


def test_as_long_as_nobody_is_known_to_be_slow_the_one_with_most_is_closed() -> None:
    unread = UnreadAnswers(10 * MIB)
    small, large = Client(unread), Client(unread)
    unread.note(large, 8 * MIB)
    unread.note(small, 3 * MIB)
    assert (small.closed, large.closed) == (False, True)


def test_what_is_read_counts_no_more() -> None:
    idle: list[int] = []
    unread = UnreadAnswers(100 * MIB, lambda: idle.append(unread.held))
    client = Client(unread)
    for _ in range(10):
        unread.note(client, 90 * MIB)
        unread.note(client, 1000)
        unread.note(client, 0)
    assert (unread.held, unread.closed) == (0, 0)
    assert idle == [1000] * 10


def test_the_first_bytes_of_a_connection_are_free() -> None:
    budget = BodyBudget(0)
    ConnectionShare(budget).take(SMALL_BODY)
    with pytest.raises(OverloadedError):
        ConnectionShare(budget).take(SMALL_BODY + 1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 600_000)), max_size=40))
def test_shares_cover_what_is_held_and_give_all_of_it_back(sizes: list[tuple[int, int]]) -> None:
    budget = BodyBudget(2 * MIB)
    shares = [ConnectionShare(budget) for _ in range(3)]
    held: list[list[int]] = [[], [], []]
    for number, size in sizes:
        if size % 3 and held[number]:
            shares[number].give_back(held[number].pop())
            continue
        before = budget.held
        try:
            shares[number].take(size)
        except OverloadedError:
            assert budget.held == before
        else:
            held[number].append(size)
        counted = sum(max(0, sum(each) - SMALL_BODY) for each in held)
        assert counted <= budget.held <= counted + 3 * 384 * 1024
    for number, share in enumerate(shares):
        for size in held[number]:
            share.give_back(size)
    assert budget.held == 0


def test_small_bodies_find_room_when_large_ones_have_taken_all() -> None:
    budget = BodyBudget(MIB)
    budget.take(MIB)
    budget.take(SMALL_BODY, small=True)
    with pytest.raises(OverloadedError):
        budget.take(1)
