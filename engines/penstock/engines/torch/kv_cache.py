"""The KV cache's tensors: keys and values of all blocks for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engines.errors import UnsupportedError
from penstock.engines.host.memory import parse_memory
from penstock.engines.torch.config import TorchConfig

_SHARE_OF_FREE_MEMORY = {"cpu": 0.5, "cuda": 0.9}
"""Of what is free once the model is loaded; on the CPU the rest is for activations and other processes."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer keeps of a token."""

    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


class KVCache:
    """Block b of a layer is keys[b] and values[b], `[block_size, kv_heads, size]` each."""

    def __init__(
        self, layouts: Mapping[nn.Module, LayerLayout], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for module, layout in layouts.items():
            shape = (num_blocks, block_size, layout.kv_heads)
            keys = torch.zeros(*shape, layout.key_size, dtype=layout.dtype, device=device)
            values = torch.zeros(*shape, layout.value_size, dtype=layout.dtype, device=device)
            self._layers[module] = (keys, values)

    def slots(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """A layer's keys and values by slot: [num_blocks * block_size, kv_heads, size], views of the blocks."""
        keys, values = self._layers[module]
        return keys.flatten(0, 1), values.flatten(0, 1)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) one after the other, in every layer."""
        for source, destination in copies:
            for keys, values in self._layers.values():
                keys[destination] = keys[source]
                values[destination] = values[source]


def size_cache(
    config: TorchConfig, device: torch.device, free: int, *, max_model_len: int, block_size: int, block_bytes: int
) -> int:
    """How many blocks: as asked for, or as many as `free` bytes hold and max_num_seqs full requests can use."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory is not None:
        count = parse_memory(config.kv_cache_memory, free=free) // block_bytes
    else:
        usable = config.max_num_seqs * -(-max_model_len // block_size)
        count = min(usable, int(free * _SHARE_OF_FREE_MEMORY[device.type]) // block_bytes)
    if count < 1:
        raise UnsupportedError(f"the KV cache does not hold one block of {block_bytes} bytes", param="kv_cache_memory")
    return count
