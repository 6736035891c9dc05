"""KV cache of OpenVINO's attention: tensors of blocks, and what a compiled model wants them to be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from penstock.engines.errors import EngineError
from penstock.engines.kit.block_rows import BlockRows, StateParts
from penstock.engines.kit.cache_size import LayerGroup
from penstock.engines.kit.features import FeatureStore
from penstock.engines.openvino.process_memory import prefer_huge_pages


class OpenVINOKVCache:
    """Block b in slot n is keys[n][b] and values[n][b], `[kv_heads, block_size, head_size]` each.

    The layers of all groups that live in a slot are bound to the same memory: a block belongs to one group at a time.
    If a group has several layers there (`LayerGroup.per_slot`), each has its part of every block. Where the layers of
    two groups do not fill a block alike, as scales of quantized values may have it, each has memory of its own.
    Quantized blocks also carry their scales and zero points, so a copied block needs nothing from elsewhere.
    """

    def __init__(
        self,
        compiled: Any,
        groups: Sequence[LayerGroup],
        num_blocks: int,
        features: FeatureStore | None = None,
        states: BlockRows | None = None,
    ) -> None:
        """`features`: of the tokens in the blocks, where a draft head is given some. `states`: rows of recurrent
        layers, which are read and written with the blocks."""
        self.features = features
        kinds = _cache_inputs(compiled)
        self._tensors: dict[str, ov.Tensor] = {}
        """By the name of the input; several have the same tensor."""
        self._raw: list[Any] = []
        """Each tensor once, as bytes [blocks, bytes of a block]; features are the last one."""
        for names in _names_by_memory(kinds, groups):
            shapes = {name: [num_blocks * per_block, *kinds[name][1]] for name, per_block in names.items()}
            kind, first = kinds[next(iter(names))][0], next(iter(shapes.values()))
            tensor = ov.Tensor(kind, ov.Shape(first))
            prefer_huge_pages(tensor.data.ctypes.data, tensor.byte_size)
            self._raw.append(tensor.data.view(np.uint8).reshape(num_blocks, -1))
            for name, shape in shapes.items():
                self._tensors[name] = tensor if shape == first else ov.Tensor(tensor.data, shape, kind)
        if features is not None:
            self._raw.append(features.raw)
        self._rows = BlockRows(self._raw)
        self._num_blocks = num_blocks
        self._parts = None if states is None else StateParts(states, self._rows.block_bytes)

    def bind(self, request: Any) -> None:
        """Makes these the caches of an infer request."""
        for name, tensor in self._tensors.items():
            request.set_tensor(name, tensor)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) one after the other, in every slot."""
        for source, destination in copies:
            for raw in self._raw:
                raw[destination] = raw[source]

    @property
    def block_bytes(self) -> int:
        """`BlockHost.block_bytes`"""
        return self._rows.block_bytes

    @property
    def row_parts(self) -> int:
        """`BlockHost.row_parts`"""
        return 0 if self._parts is None else self._parts.count

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """`BlockHost.read_blocks`: slot by slot, keys before values."""
        if self._parts is None:
            return self._rows.read(block_ids)
        ids = np.array(block_ids)
        of_states = ids >= self._num_blocks
        contents = np.empty((len(ids), self.block_bytes), np.uint8)
        contents[~of_states] = self._rows.read(ids[~of_states].tolist())
        contents[of_states] = self._parts.read((ids[of_states] - self._num_blocks).tolist())
        return contents

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[npt.NDArray[np.uint8]]) -> None:
        """`BlockHost.write_blocks`"""
        pairs = list(zip(block_ids, contents, strict=True))
        blocks = [pair for pair in pairs if pair[0] < self._num_blocks]
        self._rows.write([block_id for block_id, _ in blocks], [content for _, content in blocks])
        if self._parts is not None:
            parts = [(number - self._num_blocks, content) for number, content in pairs if number >= self._num_blocks]
            self._parts.write([number for number, _ in parts], [content for _, content in parts])


def cache_layout(compiled: Any) -> str:
    """How the compiled model lays out its blocks, and on which processor."""
    kinds = sorted((name, str(kind), shape) for name, (kind, shape) in _cache_inputs(compiled).items())
    return repr((kinds, ov.Core().get_property("CPU", "FULL_DEVICE_NAME")))


def block_layout(compiled: Any, groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """Tokens of a block, and bytes of a block over all slots, keys and values."""
    kinds = _cache_inputs(compiled)
    # Values only: quantized keys carry scales for each channel, as further rows of the axis that counts the tokens.
    tokens = {shape[1] for name, (_, shape) in kinds.items() if name.startswith("value_cache.")}
    if len(tokens) != 1:
        raise EngineError(f"the compiled model's KV cache has no one block size: {sorted(tokens)}")
    memories = [next(iter(names.items())) for names in _names_by_memory(kinds, groups)]
    return tokens.pop(), sum(_num_bytes(*kinds[name]) * per_block for name, per_block in memories)


_Inputs = Mapping[str, tuple[Any, list[int]]]
"""`_cache_inputs`"""


def _names_by_memory(kinds: _Inputs, groups: Sequence[LayerGroup]) -> list[dict[str, int]]:
    """For each piece of memory, the cache inputs that are bound to it, and how many of a layer's blocks a block has."""
    memories: dict[tuple[int, str, int], dict[str, int]] = {}
    for slot in range(max(group.num_slots for group in groups)):
        for cache in ("key_cache", "value_cache"):
            for group in groups:
                for layer in group.in_slot(slot):
                    name, per_block = f"{cache}.{layer}", group.per_slot
                    key = slot, cache, _num_bytes(*kinds[name]) * per_block
                    memories.setdefault(key, {})[name] = per_block
    return list(memories.values())


def _num_bytes(kind: Any, shape: Sequence[int]) -> int:
    return math.prod(shape) * int(kind.bitwidth) // 8


def _cache_inputs(compiled: Any) -> dict[str, tuple[Any, list[int]]]:
    """Element type and shape of one block, for each cache input by its name."""
    inputs = {}
    for port in compiled.inputs:
        name = port.any_name
        if name.startswith(("key_cache.", "value_cache.")):
            inputs[name] = port.element_type, [axis.get_length() for axis in list(port.partial_shape)[1:]]
    return inputs
