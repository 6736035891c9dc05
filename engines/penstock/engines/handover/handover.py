"""Blocks on their way between the KV cache and the memory that engines share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.engines.bell import Bell
from penstock.engines.contract.messages import EngineStats
from penstock.engines.contract.runner import BlockHost
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.handover.shared_blocks import OwnRegion, SharedBlocks
from penstock.engines.offload.block_file import RECORD_BYTES, Contents
from penstock.engines.offload.offload import read_wanted
from penstock.engines.scheduler.prefetch import Prefetch, Prefetches
from penstock.kvcache import BlockHash, KVCacheManager

logger = logging.getLogger(__name__)

_AT_ONCE = 32
"""Blocks that are copied together: a bound on the memory that this takes."""

_Read = tuple[Prefetch, dict[BlockHash, Contents], OSError | MemoryError | None]


class Handover:
    """A BlockMover. Owned by the engine's loop; a thread reads what requests wait for."""

    def __init__(
        self,
        host: BlockHost,
        kv: KVCacheManager,
        shared: SharedBlocks,
        own: OwnRegion | None,
        prefetches: Prefetches,
        clock: Callable[[], float],
    ) -> None:
        """`own`: gets what this engine computes; None: nothing does."""
        self._host = host
        self._kv = kv
        self._shared = shared
        self._own = own
        self._prefetches = prefetches
        self._clock = clock
        self._num_saved = 0
        self._num_lost = 0
        self._writes = own is not None
        """False after an error, too."""
        if own is not None:
            kv.in_use = {}
        self._reader = ThreadPoolExecutor(1, "kv-handover-read")
        self._lock = threading.Lock()
        """Guards the next two: the thread rings when it is done."""
        self._done: list[_Read] = []
        self._bell = Bell()

    @property
    def wakeups(self) -> Sequence[int]:
        return (self._bell.wakeup,)

    def begin(self) -> None:
        begun = self._prefetches.begun
        for prefetch in begun:
            self._reader.submit(self._read, prefetch)
        begun.clear()

    def carry_out(self, step: SchedulerOutput) -> None:
        if step.block_loads:
            blocks, loaded = zip(*step.block_loads, strict=True)
            self._host.write_blocks(blocks, loaded)

    def collected(self) -> None:
        """Writes what the step has completed of prompts, and what requests found in the prefix cache. This comes before
        the outputs of the step leave: who learns that a prompt is computed finds its blocks."""
        used = self._kv.in_use
        if not used:
            return
        keys, self._kv.in_use = list(used), {}
        if not self._writes or self._own is None:
            return
        try:
            wanted = [key for key in keys if not self._own.keeps(key)]
            for first in range(0, len(wanted), _AT_ONCE):
                self._write(self._own, wanted[first : first + _AT_ONCE])
        except (OSError, MemoryError) as error:
            self._writes = False
            logger.warning("blocks are not handed over any more: %s", error or "no memory")

    def _write(self, own: OwnRegion, keys: Sequence[BlockHash]) -> None:
        found = [(block_id, key) for key in keys if (block_id := self._kv.pool.lookup(key)) is not None]
        if not found:
            return
        contents = self._host.read_blocks([block_id for block_id, _ in found])
        for (_, key), block in zip(found, contents, strict=True):
            own.write(key, block)
        self._num_saved += len(found)

    def advance(self) -> None:
        with self._lock:
            done, self._done = self._done, []
            self._bell.silence()
        for prefetch, contents, error in done:
            if error is not None:
                logger.warning("blocks of another engine cannot be read: %s", error or "no memory")
            if prefetch.contents is None:
                self._num_lost += len(prefetch.wanted) - len(contents)
            self._prefetches.ended(prefetch, contents, self._clock())
        self._prefetches.give_up(self._clock())

    def clear(self) -> None:
        self._prefetches.clear()
        if self._own is None:
            return
        self._kv.in_use = {}
        try:
            self._own.clear()
        except OSError as error:
            self._writes = False
            logger.warning("blocks are not handed over any more: %s", error)

    def report(self, stats: EngineStats) -> None:
        kept = 0 if self._own is None else self._own.num_kept
        stats.handover_bytes = kept * (self._host.block_bytes + RECORD_BYTES)
        stats.handover_saved = self._num_saved
        stats.handover_loaded = self._prefetches.num_loaded
        stats.handover_lost = self._num_lost
        stats.handover_missed_tokens = self._prefetches.num_missed_tokens
        stats.handover_waits = self._prefetches.num_waits
        stats.handover_wait_seconds = self._prefetches.wait_seconds

    def close(self, *, save: bool) -> None:
        """What is shared stays, as long as its memory does."""
        self._reader.shutdown(cancel_futures=True)
        self._shared.close()
        with self._lock:
            self._bell.close()

    def _read(self, prefetch: Prefetch) -> None:
        contents, error = read_wanted(prefetch, self._shared.read)
        with self._lock:
            self._done.append((prefetch, contents, error))
            self._bell.ring()
