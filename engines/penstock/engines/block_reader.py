"""Blocks on their way into the KV cache and out of it: files, or memory that engines share, are at the other end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.runner import BlockHost
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.offload.block_file import Contents
from penstock.engines.scheduler.pending import SideWork
from penstock.engines.scheduler.prefetch import Prefetch, Prefetches
from penstock.kvcache import BlockHash

ReadSlot = Callable[[int, BlockHash], Contents | None]
"""What a slot holds for a hash; None: something else. Raises OSError and MemoryError."""


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """What came of a prefetch."""

    prefetch: Prefetch
    contents: dict[BlockHash, Contents]
    """By hash, what was found for it."""
    error: OSError | MemoryError | None
    """That ended the reading."""


class BlockReader:
    """The reading half of a BlockMover. Owned by the engine's loop; one thread reads, one prefetch after the other."""

    def __init__(
        self, host: BlockHost, prefetches: Prefetches, tell: Callable[[BlocksRead], None], thread_name: str
    ) -> None:
        """`tell` is called on the thread, once for each prefetch that was read."""
        self._host = host
        self._prefetches = prefetches
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, thread_name)

    def begin(self, read: ReadSlot) -> None:
        """Has the blocks read that requests wait for. `read` is called on the thread."""
        begun = self._prefetches.begun
        for prefetch in begun:
            self._thread.submit(self._read, prefetch, read)
        begun.clear()

    def call(self, function: Callable[[], None]) -> None:
        """On the thread, behind what it has to read."""
        self._thread.submit(function)

    def carry_out(self, step: SchedulerOutput) -> None:
        """Copies those blocks in that the step reads."""
        if step.block_loads:
            blocks, loaded = zip(*step.block_loads, strict=True)
            self._host.write_blocks(blocks, loaded)

    def close(self, *, wait: bool) -> None:
        """Drops what is not being read yet. `wait`: until the thread has ended. May be called again."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _read(self, prefetch: Prefetch, read: ReadSlot) -> None:
        self._tell(read_prefetch(prefetch, read))


def read_prefetch(prefetch: Prefetch, read: ReadSlot) -> BlocksRead:
    """What a request waits for, as far as `read` finds it, and the error that ended the reading. On a thread."""
    contents: dict[BlockHash, Contents] = {}
    try:
        for block_hash, slot in prefetch.blocks:
            if prefetch.contents is not None:  # nobody waits any more
                break
            block = read(slot, block_hash)
            if block is not None:
                contents[block_hash] = block
    except (OSError, MemoryError) as error:
        return BlocksRead(prefetch, contents, error)
    return BlocksRead(prefetch, contents, None)


class BlockMover(SideWork, Protocol):
    """Driven by the engine's loop: `advance` between steps, `begin` when one is scheduled, `carry_out` before it is
    submitted, `collected` when its result is there."""

    def begin(self) -> None:
        """Has the blocks read that requests wait for."""
        ...

    def carry_out(self, step: SchedulerOutput) -> None:
        """Copies the blocks out that the step may overwrite, and those in that it reads."""
        ...

    def collected(self) -> None:
        """A step has succeeded, and its outputs have not left yet."""
        ...

    def clear(self) -> None:
        """After the prefix cache was emptied: what is elsewhere is deleted, too."""
        ...

    def report(self, stats: EngineStats) -> None:
        """Puts its figures there."""
        ...

    def close(self, *, save: bool) -> None:
        """`save`: what the cache holds is of use to a later process."""
        ...
