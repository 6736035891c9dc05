"""From settings to the memory that a runner's KV cache shares with other engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engines.contract.runner import BlockHost, ModelRunner
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.handover.handover import Handover
from penstock.engines.handover.settings import HandoverConfig
from penstock.engines.handover.shared_blocks import OwnRegion, SharedBlocks, SharedRegion, checksum_key, num_slots
from penstock.engines.offload import READING_BYTES
from penstock.engines.scheduler.prefetch import Prefetches
from penstock.kvcache import BlockHasher, KVCacheManager


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
    kv = KVCacheManager(info.num_blocks, info.kv_groups, hasher=hasher, source=shared)
    return SharedCache(kv, runner, shared, own)
