"""What is said of a loaded model: its ends of sequence, and in tokens how much its KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

from penstock.engines.errors import EngineError
from penstock.engines.vllm.requests import usable_blocks


def eos_token_ids(model_config: Any) -> tuple[int, ...]:
    """Of generation_config.json, else of config.json."""
    eos = model_config.try_get_generation_config().get("eos_token_id")
    if eos is None:
        eos = getattr(model_config.hf_text_config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)


def description(version: str, settings: Any, scheduler: str = "") -> str:
    dtype = str(settings.model_config.dtype).removeprefix("torch.")
    devices = settings.parallel_config.world_size
    cache = f"kv {settings.cache_config.cache_dtype}"
    return f"vllm {version}, {current_platform.device_type} x{devices}, {dtype}, {cache}{scheduler}"


@dataclass(frozen=True)
class Capacity:
    """A pool of blocks, whose number says little where several groups of layers draw from it: in blocks of tokens."""

    block_size: int
    num_blocks: int
    """Blocks of `block_size` tokens that long requests could have together."""
    pool_blocks: int
    """vLLM's, without the null block."""
    longest: int
    """Tokens of the longest request that the pool can hold alone, within the model's limit."""

    def in_blocks(self, pool_blocks: int) -> int:
        return pool_blocks * self.num_blocks // self.pool_blocks


def capacity(settings: Any, cache: Any) -> Capacity:
    """Raises EngineError for a cache in which not even a short request has room.

    A request takes blocks for each group of layers: one for each `block_size` tokens where attention is full, a bounded
    number where it has a window, one for a recurrent state. With one group of full attention it all adds up simply;
    otherwise blocks of tokens are counted as a request of the greatest length would take them.
    """
    pool = usable_blocks(cache.num_blocks)
    block_size = settings.cache_config.block_size
    drafts = settings.speculative_config
    longest = _longest(settings, cache, pool)
    if drafts is not None and longest < settings.model_config.max_model_len:
        longest -= drafts.num_speculative_tokens  # room for drafts behind the last token
    if longest < 2:
        raise EngineError(
            f"a KV cache of {pool} blocks is too small for this model; --kv-cache-memory or --num-kv-blocks"
        )
    per_request = _blocks_needed(settings, cache, longest)
    whole = -(-longest // block_size)
    return Capacity(block_size, max(whole, pool * whole // per_request), pool, longest)


def _longest(settings: Any, cache: Any, pool: int) -> int:
    low, high = 0, settings.model_config.max_model_len
    if _blocks_needed(settings, cache, high) <= pool:
        return int(high)
    while high - low > 1:
        middle = (low + high) // 2
        if _blocks_needed(settings, cache, middle) <= pool:
            low = middle
        else:
            high = middle
    return low


def _blocks_needed(settings: Any, cache: Any, length: int) -> int:
    """Of the pool, by one request of this length. vLLM asks the configuration for the length."""
    model = settings.model_config
    limit = model.max_model_len
    model.max_model_len = length
    try:
        return round(cache.num_blocks / get_max_concurrency_for_kv_cache_config(settings, cache))
    finally:
        model.max_model_len = limit
