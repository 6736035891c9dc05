"""Shared memory for large tensors."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.classic.python.worker import wire
from penstock.classic.python.worker.wire import ReceiveArena, SendArena

PAGE = 4096


class Pair:
    def __init__(self, initial: int = PAGE, growth: int = PAGE) -> None:
        self.file = os.memfd_create("test")
        self.sender = SendArena(self.file, initial, growth)
        self.receiver = ReceiveArena(self.file)

    def send(self, data: bytes) -> np.ndarray:
        segment, offset = self.sender.put(data, len(data))
        self.receiver.grown(self.sender.announcement())
        return self.receiver.array(self.receiver.loan(segment, offset), segment, offset, len(data))

    def give_back(self) -> None:
        self.sender.release(self.receiver.returned())


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    os.close(found.file)


def test_the_receiver_sees_what_was_put(pair: Pair) -> None:
    assert pair.send(b"abc").tobytes() == b"abc"
    assert pair.send(b"x" * 100_000).tobytes() == b"x" * 100_000


def test_a_block_comes_back_with_the_last_view_of_it(pair: Pair) -> None:
    array = pair.send(bytes(range(200)))
    view = array.view(np.uint32).reshape(5, 10)[1:, ::2]
    del array
    pair.give_back()
    assert pair.sender.used == 256
    first = view.copy()
    other = pair.send(b"y" * 200)
    np.testing.assert_array_equal(view, first)
    del view, other
    gc.collect()
    pair.give_back()
    assert pair.sender.used == 0


def test_a_loan_without_an_array_comes_back(pair: Pair) -> None:
    segment, offset = pair.sender.put(b"abc", 3)
    loan = pair.receiver.loan(segment, offset)
    assert pair.receiver.returned() == []
    del loan
    assert pair.receiver.returned() == [[segment, offset]]


def test_it_grows_by_at_least_the_growth() -> None:
    pair = Pair(initial=PAGE, growth=8 * PAGE)
    kept = [pair.send(b"a" * PAGE)]
    assert pair.sender.size == PAGE
    kept.append(pair.send(b"b" * PAGE))
    assert pair.sender.size == 9 * PAGE
    kept.append(pair.send(b"c" * 20 * PAGE))
    assert pair.sender.size == 29 * PAGE
    assert [array[0] for array in kept] == [97, 98, 99]
    os.close(pair.file)


def test_very_large_segments_give_their_memory_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_KEPT", 10 * PAGE)

    def pages() -> int:
        return os.fstat(pair.file).st_blocks * 512 // PAGE

    small, large = pair.send(b"a" * PAGE), pair.send(b"b" * 50 * PAGE)
    assert pages() == 51
    del small, large
    pair.give_back()
    assert pages() == 1
    assert (pair.send(b"c" * 50 * PAGE) == ord("c")).all()


def test_memory_that_cannot_be_had() -> None:
    reading = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(OSError):
        SendArena(reading, PAGE, PAGE).put(b"abc", 3)
    os.close(reading)


def test_random_lives(pair: Pair) -> None:
    """Blocks never overlap, and in the end all is free in one piece."""
    chance = random.Random(7)
    living: list[tuple[int, np.ndarray]] = []
    for number in range(400):
        if living and chance.random() < 0.45:
            tag, array = living.pop(chance.randrange(len(living)))
            assert (array == tag).all()
            del array
            if chance.random() < 0.5:
                pair.give_back()
        tag = number % 251
        living.append((tag, pair.send(bytes([tag]) * chance.randrange(1, 3 * PAGE))))
        assert all((array == tag).all() for tag, array in living[-3:])
    assert all((array == tag).all() for tag, array in living)
    living.clear()
    pair.give_back()
    assert pair.sender.used == 0
    assert all(len(segment.free) == 1 for segment in pair.sender._segments)
