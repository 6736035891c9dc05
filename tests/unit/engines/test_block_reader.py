"""Blocks that requests wait for, read on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.engines.block_reader import BlockReader, BlocksRead
from penstock.engines.scheduler.prefetch import Prefetch

WAIT = 30
"""Seconds, for what is sure to come."""
BLOCK = np.zeros(8, np.uint8)


class Host:
    block_bytes = 8

    def __init__(self) -> None:
        self.written: list[tuple[Any, Any]] = []

    def write_blocks(self, blocks: Any, contents: Any) -> None:
        self.written.append((blocks, contents))


class Bench:
    """A reader, and what it tells."""

    def __init__(self) -> None:
        self.host = Host()
        self.begun: list[Prefetch] = []
        self.told: SimpleQueue[BlocksRead] = SimpleQueue()
        prefetches: Any = SimpleNamespace(begun=self.begun)
        self.reader = BlockReader(self.host, prefetches, self.told.put, "test-read")  # type: ignore[arg-type]

    def want(self, *slots: int) -> Prefetch:
        request: Any = None
        prefetch = Prefetch(request, [(b"%d" % slot, slot) for slot in slots], 0.0, 5.0)
        self.begun.append(prefetch)
        return prefetch


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.reader.close(wait=True)


def has_even(slot: int, block_hash: bytes) -> Any:
    assert block_hash == b"%d" % slot
    return None if slot % 2 else BLOCK


def test_prefetches_are_read_once_in_their_order(bench: Bench) -> None:
    wanted = [bench.want(*range(count)) for count in range(4)]
    bench.reader.begin(has_even)
    assert bench.begun == []
    bench.reader.begin(has_even)
    done = [bench.told.get(timeout=WAIT) for _ in wanted]
    bench.reader.close(wait=True)
    assert bench.told.empty()
    assert [each.prefetch for each in done] == wanted
    assert [list(each.contents) for each in done] == [[], [b"0"], [b"0"], [b"0", b"2"]]
    assert {each.error for each in done} == {None}


@pytest.mark.parametrize("problem", [OSError("torn"), MemoryError()])
def test_an_error_ends_the_reading_of_one(bench: Bench, problem: Exception) -> None:
    def read(slot: int, block_hash: bytes) -> Any:
        if slot == 2:
            raise problem
        return BLOCK

    bench.want(1, 2, 3)
    bench.want(4)
    bench.reader.begin(read)
    failed, other = bench.told.get(timeout=WAIT), bench.told.get(timeout=WAIT)
    assert (list(failed.contents), failed.error) == ([b"1"], problem)
    assert (list(other.contents), other.error) == ([b"4"], None)


def held() -> tuple[Callable[[int, bytes], Any], threading.Event, threading.Event]:
    """A way to read that says when it has begun, and waits until it may end."""
    begun, may_end = threading.Event(), threading.Event()

    def read(slot: int, block_hash: bytes) -> Any:
        begun.set()
        assert may_end.wait(WAIT)
        return BLOCK

    return read, begun, may_end


def test_what_nobody_waits_for_any_more_is_read_no_further(bench: Bench) -> None:
    read, begun, may_end = held()
    prefetch = bench.want(1, 2)
    bench.reader.begin(read)
    assert begun.wait(WAIT)
    prefetch.contents = {}
    may_end.set()
    assert list(bench.told.get(timeout=WAIT).contents) == [b"1"]


def test_at_its_end_only_what_is_being_read_is_told(bench: Bench) -> None:
    read, begun, may_end = held()
    first, _ = bench.want(1), bench.want(2)
    bench.reader.begin(read)
    assert begun.wait(WAIT)
    bench.reader.close(wait=False)  # though the thread reads on
    assert bench.told.empty()
    may_end.set()
    bench.reader.close(wait=True)
    assert bench.told.get_nowait().prefetch is first
    assert bench.told.empty()


def test_a_step_s_blocks_are_copied_in(bench: Bench) -> None:
    step: Any = SimpleNamespace(block_loads=[])
    bench.reader.carry_out(step)
    assert bench.host.written == []
    step.block_loads = [(7, "seven"), (3, "three")]
    bench.reader.carry_out(step)
    assert bench.host.written == [((7, 3), ("seven", "three"))]
