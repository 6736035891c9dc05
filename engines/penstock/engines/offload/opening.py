"""From settings to the tier behind a runner's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.contract.runner import BlockHost, ModelRunner
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.offload import READING_BYTES, WRITING_BYTES
from penstock.engines.offload.block_file import RECORD_BYTES
from penstock.engines.offload.folder import ModelFolder
from penstock.engines.offload.offload import Offload
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.prefetch import Prefetches
from penstock.kvcache import BlockHasher, BlockTier, KVCacheManager

_FLAG = "--kv-offload-dir"


@dataclass(frozen=True)
class OffloadTier:
    """The books of a KV cache with a tier, whose files are not open yet."""

    kv: KVCacheManager
    tier: BlockTier
    host: BlockHost
    folder: ModelFolder

    def begin(self, prefetches: Prefetches, clock: Callable[[], float]) -> Offload:
        """Raises EngineError for a folder that cannot be used."""
        try:
            return Offload(self.host, self.folder, self.kv, self.tier, prefetches, clock)
        except OSError as error:
            raise EngineError(f"{_FLAG}: {error}") from error


def offload_tier(runner: ModelRunner, config: SchedulerConfig) -> OffloadTier:
    """Raises UnsupportedError for a runner whose blocks cannot be read, EngineError for a folder or a size that cannot
    be used."""
    if not isinstance(runner, BlockHost):
        raise UnsupportedError(f"{_FLAG}: this engine's KV cache cannot be read ({runner.info.runner}).")
    slot_bytes = runner.block_bytes + RECORD_BYTES
    num_slots = config.kv_offload_bytes // slot_bytes
    if not num_slots:
        raise EngineError(f"--kv-offload-bytes: one block of this model takes {slot_bytes}")
    try:
        folder = ModelFolder(Path(config.kv_offload_dir), runner.cache_identity())
    except (OSError, ValueError) as error:
        raise EngineError(f"{_FLAG}: {error}") from error
    tier = BlockTier(num_slots, max(1, WRITING_BYTES // slot_bytes), max(1, READING_BYTES // slot_bytes))
    info = runner.info
    kv = KVCacheManager(info.num_blocks, info.kv_groups, hasher=BlockHasher(folder.hash_key), tier=tier)
    return OffloadTier(kv, tier, runner, folder)
