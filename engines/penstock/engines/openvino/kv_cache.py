"""The KV cache's tensors: keys and values of all blocks for each layer, as the compiled model lays them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import openvino as ov

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.host.memory import available_memory
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.huge_pages import prefer_huge_pages

_SHARE_OF_FREE_MEMORY = 0.5
"""Of what is free once the weights are loaded: the rest is for activations, logits and other processes."""


class KVCache:
    """Block b of layer n are key_cache.n[b] and value_cache.n[b], `[kv_heads, block_size, head_size]` each.

    With u8 they also carry their scales and zero points, so a copied block needs nothing from elsewhere.
    """

    def __init__(self, compiled: Any, num_blocks: int) -> None:
        self._tensors: dict[str, ov.Tensor] = {}
        for name, kind, shape in _cache_inputs(compiled):
            self._tensors[name] = ov.Tensor(kind, ov.Shape([num_blocks, *shape]))
            prefer_huge_pages(self._tensors[name].data.ctypes.data, self._tensors[name].byte_size)
        self._raw = [_bytes_of(tensor) for tensor in self._tensors.values()]

    def bind(self, request: Any) -> None:
        """Makes these the caches of an infer request."""
        for name, tensor in self._tensors.items():
            request.set_tensor(name, tensor)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) one after the other, in every layer."""
        for source, destination in copies:
            for raw in self._raw:
                raw[destination] = raw[source]


def block_layout(compiled: Any) -> tuple[int, int]:
    """Tokens of a block, and bytes of a block over all layers, keys and values."""
    inputs = _cache_inputs(compiled)
    # Values only: quantized keys carry scales for each channel, as further rows of the axis that counts the tokens.
    tokens = {shape[1] for name, _, shape in inputs if name.startswith("value_cache.")}
    if len(tokens) != 1:
        raise EngineError(f"the compiled model's KV cache has no one block size: {sorted(tokens)}")
    return tokens.pop(), sum(math.prod(shape) * kind.size for _, kind, shape in inputs)


def size_cache(config: OpenVINOConfig, max_model_len: int, block_size: int, block_bytes: int) -> int:
    """How many blocks: as asked for, or as many as the memory holds and max_num_seqs full requests can use."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory is not None:
        count = config.kv_cache_memory // block_bytes
    else:
        usable = config.max_num_seqs * -(-max_model_len // block_size)
        count = min(usable, int(available_memory() * _SHARE_OF_FREE_MEMORY) // block_bytes)
    if count < 1:
        raise UnsupportedError(f"the KV cache does not hold one block of {block_bytes} bytes", param="kv_cache_memory")
    return count


def _cache_inputs(compiled: Any) -> list[tuple[str, Any, list[int]]]:
    """Name, element type and shape of one block, for each cache input."""
    found = []
    for port in compiled.inputs:
        name = port.any_name
        if name.startswith(("key_cache.", "value_cache.")):
            found.append((name, port.element_type, [axis.get_length() for axis in list(port.partial_shape)[1:]]))
    return found


def _bytes_of(tensor: ov.Tensor) -> Any:
    """A writable view [blocks, bytes of a block], whatever the element type."""
    blocks = tensor.shape[0]
    data = tensor.data
    return data.view("uint8").reshape(blocks, -1)
