"""What TensorRT-LLM tells of each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engines.errors import EngineError
from penstock.engines.tensorrt_llm.contract import KV_CACHE_STATS, STATS


@dataclass(frozen=True, slots=True)
class Sample:
    num_active: int
    """Requests that it worked on when the iteration began, those that ended in it included."""
    num_blocks: int
    num_free_blocks: int
    """Cached ones that nobody uses included."""
    block_size: int


def read_stats(stats: Mapping[str, Any]) -> Sample:
    """Raises EngineError that names what is missing."""
    cache = stats.get("kvCacheStats") or {}
    missing = [name for name in STATS if name not in stats] + [name for name in KV_CACHE_STATS if name not in cache]
    if missing:
        raise EngineError(f"TensorRT-LLM's statistics are not what this engine was made for: no {', '.join(missing)}")
    return Sample(stats["numActiveRequests"], cache["maxNumBlocks"], cache["freeNumBlocks"], cache["tokensPerBlock"])
