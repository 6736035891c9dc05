"""Contents of KV cache blocks, where vLLM keeps them in memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.errors import UnsupportedError

Rows = npt.NDArray[np.uint8]


class BlockMemory:
    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        """`caches`: of each layer, [num_blocks, ...]; layers of several groups can lie in the same memory, at blocks of
        other numbers. Raises UnsupportedError where a block of a layer is not one piece of memory."""
        shared = {cache.data_ptr(): cache for cache in caches}
        self._rows = [_rows(cache, num_blocks) for cache in shared.values()]
        """Of each piece of memory, [num_blocks, bytes]."""
        self.layout = repr([(tuple(cache.shape), cache.stride(), str(cache.dtype)) for cache in shared.values()])
        """How numbers lie in a block."""

    @property
    def block_bytes(self) -> int:
        return sum(rows.shape[1] for rows in self._rows)

    def read(self, block_ids: Sequence[int]) -> Rows:
        """Copies, [blocks, block_bytes]. `block_ids` are vLLM's."""
        chosen = np.array(block_ids)
        return np.concatenate([rows[chosen] for rows in self._rows], axis=1)

    def write(self, block_ids: Sequence[int], contents: Sequence[Rows]) -> None:
        """What `read` gave, a row for each block."""
        for block_id, block in zip(block_ids, contents, strict=True):
            begin = 0
            for rows in self._rows:
                end = begin + rows.shape[1]
                rows[block_id] = block[begin:end]
                begin = end


def _rows(cache: torch.Tensor, num_blocks: int) -> Rows:
    length = cache.stride(0)
    if cache.device.type != "cpu" or cache.shape[0] != num_blocks or length * num_blocks != cache.numel():
        raise UnsupportedError(f"vLLM's KV cache cannot be read: {tuple(cache.shape)} with strides {cache.stride()}")
    rows: Rows = cache.as_strided((num_blocks, length), (length, 1)).view(torch.uint8).numpy()
    return rows


def cache_tensors(executor: Any) -> list[torch.Tensor]:
    """Of the one worker, which lives in this process."""
    [caches] = executor.collective_rpc("penstock_kv_caches")
    return list(caches)
