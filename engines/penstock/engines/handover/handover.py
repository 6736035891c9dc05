"""Blocks on their way between the KV cache and the memory that engines share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engines.block_reader import BlockReader, BlocksRead
from penstock.engines.contract.engine_stats import EngineStats, TierStats
from penstock.engines.contract.messages import CallReply
from penstock.engines.contract.runner import BlockHost, ModelRunner
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.handover.settings import HandoverConfig
from penstock.engines.handover.shared_blocks import OwnRegion, SharedBlocks, SharedRegion, checksum_key, num_slots
from penstock.engines.inbox import Inbox
from penstock.engines.offload import READING_BYTES
from penstock.engines.offload.block_file import RECORD_BYTES
from penstock.engines.scheduler.prefetch import Prefetches
from penstock.kvcache import BlockHash, BlockHasher, KVCacheManager, cache_manager

logger = logging.getLogger(__name__)

_AT_ONCE = 32
"""Blocks that are copied together: a bound on the memory that this takes."""


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
        self._inbox: Inbox[BlocksRead] = Inbox()
        self._reader = BlockReader(host, prefetches, self._inbox.put, "kv-handover-read")

    under_way = (True,)
    """It always is: other processes and files may have news at any time."""

    @property
    def next_look(self) -> float | None:
        return self._prefetches.next_look

    @property
    def wakeups(self) -> Sequence[int]:
        return (self._inbox.wakeup,)

    def begin(self) -> None:
        self._reader.begin(self._shared.read)

    def carry_out(self, step: SchedulerOutput) -> None:
        self._reader.carry_out(step)

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
            missing = [key for key in keys if not self._own.keeps(key)]
            for first in range(0, len(missing), _AT_ONCE):
                self._write(self._own, missing[first : first + _AT_ONCE])
        except (OSError, MemoryError) as error:
            self._writes = False
            logger.warning("blocks are not handed over any more: %s", error or "no memory")

    def _write(self, own: OwnRegion, keys: Sequence[BlockHash]) -> None:
        blocks = [(block_id, key) for key in keys if (block_id := self._kv.find(key)) is not None]
        if not blocks:
            return
        contents = self._host.read_blocks([block_id for block_id, _ in blocks])
        for (_, key), block in zip(blocks, contents, strict=True):
            own.write(key, block)
        self._num_saved += len(blocks)

    def advance(self) -> Sequence[CallReply]:
        for done in self._inbox.take():
            if done.error is not None:
                logger.warning("blocks of another engine cannot be read: %s", done.error or "no memory")
            if done.prefetch.contents is None:
                self._num_lost += len(done.prefetch.blocks) - len(done.contents)
            self._prefetches.ended(done.prefetch, done.contents, self._clock())
        self._prefetches.give_up(self._clock())
        return ()

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
        stats.handover = TierStats(
            blocks=kept,
            bytes=kept * (self._host.block_bytes + RECORD_BYTES),
            saved=self._num_saved,
            loaded=self._prefetches.num_loaded,
            lost=self._num_lost,
            missed_tokens=self._prefetches.num_missed_tokens,
            waits=self._prefetches.num_waits,
            wait_seconds=self._prefetches.wait_seconds,
        )

    def close(self, *, save: bool) -> None:
        """What is shared stays, as long as its memory does."""
        self._reader.close(wait=True)
        self._shared.close()
        self._inbox.close()


@dataclass(frozen=True)
class SharedCache:
    """The books of a KV cache with shared memory beside it."""

    kv: KVCacheManager
    host: BlockHost
    shared: SharedBlocks
    own: OwnRegion | None

    def begin(self, prefetches: Prefetches, clock: Callable[[], float]) -> Handover:
        return Handover(self.host, self.kv, self.shared, self.own, prefetches, clock)


def shared_cache(runner: ModelRunner, config: HandoverConfig) -> SharedCache:
    """Raises UnsupportedError for a runner whose blocks cannot be read, EngineError for memory that cannot be used or
    that is too small."""
    if not isinstance(runner, BlockHost):
        raise UnsupportedError(f"--prefill-replicas: this engine's KV cache cannot be read ({runner.info.runner}).")
    block_bytes = runner.block_bytes
    slots = num_slots(config.region_bytes, block_bytes)
    if not slots:
        raise EngineError(f"--handover-bytes: one block of this model takes {block_bytes} for each prefill replica")
    key = checksum_key(config.key, runner.cache_identity())
    kinds = [OwnRegion if number == config.own else SharedRegion for number in range(len(config.regions))]
    try:
        regions = [kind(region, slots, block_bytes, key) for kind, region in zip(kinds, config.regions, strict=True)]
    except OSError as error:
        raise EngineError(f"--prefill-replicas: the shared memory cannot be opened: {error}") from error
    shared = SharedBlocks(regions, max(1, READING_BYTES // block_bytes))
    own = next((region for region in regions if isinstance(region, OwnRegion)), None)
    info = runner.info
    hasher = BlockHasher(config.key, adapters_of=config.key)
    kv = cache_manager(
        info.num_blocks, info.kv_groups, info.states, hasher=hasher, source=shared, parts=runner.row_parts
    )
    return SharedCache(kv, runner, shared, own)
