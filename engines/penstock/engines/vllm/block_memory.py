"""Contents of KV cache blocks, where vLLM keeps them in memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.block_rows import BlockRows, Bytes


class BlockMemory(BlockRows):
    """`block_ids` are vLLM's."""

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        """`caches`: of each layer, [num_blocks, ...]; layers of several groups can lie in the same memory, at blocks of
        other numbers. Raises UnsupportedError where a block of a layer is not one piece of memory."""
        shared = {cache.data_ptr(): cache for cache in caches}
        super().__init__([_rows(cache, num_blocks) for cache in shared.values()])
        self.layout = repr([(tuple(cache.shape), cache.stride(), str(cache.dtype)) for cache in shared.values()])
        """How numbers lie in a block."""


def _rows(cache: torch.Tensor, num_blocks: int) -> Bytes:
    length = cache.stride(0)
    if cache.device.type != "cpu" or cache.shape[0] != num_blocks or length * num_blocks != cache.numel():
        raise UnsupportedError(f"vLLM's KV cache cannot be read: {tuple(cache.shape)} with strides {cache.stride()}")
    rows: Bytes = cache.as_strided((num_blocks, length), (length, 1)).view(torch.uint8).numpy()
    return rows


def cache_tensors(executor: Any) -> list[torch.Tensor]:
    """Of the one worker, which lives in this process."""
    [caches] = executor.collective_rpc("penstock_kv_caches")
    return list(caches)
