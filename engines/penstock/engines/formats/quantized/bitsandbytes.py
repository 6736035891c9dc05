"""Checkpoints of bitsandbytes.

In 4 bits `weight` has two weights in a byte, and beside it are `weight.absmax` (a scale for each block),
`weight.quant_map` (the 16 values) and `weight.quant_state.bitsandbytes__nf4`, JSON in bytes; scales that are quantized,
too, have `weight.nested_absmax` and `weight.nested_quant_map`. In 8 bits `SCB` [rows] is 127 times the scale of each
row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.quantized.integers import Bytes, Floats, IntegerTensor
from penstock.engines.formats.quantized.settings import Module, Settings, flag, split_modules
from penstock.engines.formats.safetensors_file import StoredTensor


@dataclass(frozen=True)
class BlockScales:
    """The scale of each block of weights; nested: in 8 bits, with a table and scales of their own."""

    stored: StoredTensor
    table: Floats | None = None
    """256 values; None: scales are stored as floats."""
    outer: Floats | None = None
    outer_block: int = 1
    offset: float = 0.0

    def blocks(self, start: int, stop: int) -> Floats:
        """Of blocks [start, stop)."""
        if self.table is None or self.outer is None:
            return self.stored.rows_f32(start, stop)
        outer = self.outer[np.arange(start, stop) // self.outer_block]
        inner: Floats = self.table[self.stored.integers()[start:stop]]
        return inner * outer + np.float32(self.offset)


@dataclass(frozen=True)
class CodebookTensor:
    """As `StoredTensor`. Blocks go through the rows one after the other, and may go over their ends."""

    shape: tuple[int, int]
    """The width is even."""
    values: npt.NDArray[np.uint8]
    """[rows * width / 2], the first of two in the high half."""
    table: Floats
    """16 values."""
    block: int
    """Weights that share a scale."""
    scales: BlockScales
    parts: tuple[StoredTensor, ...]
    """What the file holds of it."""

    bits = 4
    dtype = "fp4"

    def rows_f32(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) as float32."""
        width = self.shape[1]
        begin, end = start * width, stop * width
        codes = self.values[begin // 2 : end // 2]
        values = np.stack([self.table[codes >> 4], self.table[codes & 15]], axis=1).reshape(-1)
        first = begin // self.block
        scales = self.scales.blocks(first, -(-end // self.block)).repeat(self.block)
        values *= scales[begin - first * self.block : end - first * self.block]
        return values.reshape(stop - start, width)

    def f32(self) -> Floats:
        return self.rows_f32(0, self.shape[0])


_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_FOUR_BIT_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *(_STATE[1:] + kind for kind in _KINDS))
_LARGEST = np.float32(127)
_LARGEST_BLOCK = 4096
"""That the library makes. A file with more would have each scale written out for as many weights."""


@dataclass(frozen=True)
class BitsAndBytes:
    """What quantization_config says."""

    bits: int

    name = "bitsandbytes"

    def assemble(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | IntegerTensor | CodebookTensor]:
        """By the names of a checkpoint of floats. Raises EngineError for tensors that do not go together."""
        matrices = {name.partition(_STATE)[0]: Module(name.partition(_STATE)[0]) for name in stored if _STATE in name}
        plain = {}
        for name, tensor in stored.items():
            matrix, _, part = name.partition(".weight.")
            if part and f"{matrix}.weight" in matrices:
                matrices[f"{matrix}.weight"].parts[part] = tensor
            elif name in matrices:
                matrices[name].parts["weight"] = tensor
            else:
                plain[name] = tensor
        modules, rest = split_modules(plain, lambda part, tensor: part == "SCB")
        tensors: dict[str, StoredTensor | IntegerTensor | CodebookTensor] = dict(rest)
        tensors |= {f"{module.name}.weight": _int8(module) for module in modules}
        return tensors | {name: _four_bits(module) for name, module in matrices.items()}


def _int8(module: Module) -> IntegerTensor:
    module.check_parts(("weight", "SCB", "weight_format"))
    weight = module.matrix("weight", ["I8"])
    if "weight_format" in module.parts and module.take("weight_format", ["U8"]).integers().any():
        raise UnsupportedError(f"{module.name} has a weight_format other than rows, which is not supported")
    rows, width = weight.shape
    layout = _Int8Rows(weight, module.take("SCB", ["F32"], (rows,)))
    return IntegerTensor(8, (rows, width), 1, None, layout, (weight, layout.stored_scales))


@dataclass(frozen=True)
class _Int8Rows:
    weight: StoredTensor
    stored_scales: StoredTensor

    def levels(self, start: int, stop: int) -> Bytes:
        levels: Bytes = self.weight.integers()[start:stop].view(np.uint8) ^ np.uint8(128)
        return levels

    def zeros(self, start: int, stop: int) -> Bytes:
        return np.full((stop - start, 1), 128, np.uint8)

    def scales(self, start: int, stop: int) -> Floats:
        return self.stored_scales.rows_f32(start, stop)[:, None] / _LARGEST


def _four_bits(module: Module) -> CodebookTensor:
    module.check_parts(("weight", *_FOUR_BIT_PARTS))
    kind = next(kind for kind in _KINDS if _STATE[1:] + kind in module.parts)
    state = _state(module, _STATE[1:] + kind)
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise EngineError(f"{module.name} has shape {str(shape)[:50]}, which is not that of a matrix")
    rows, width = shape
    if type(block) is not int or not 0 < block <= _LARGEST_BLOCK or width % 2:
        raise EngineError(f"{module.name}: blocks of {str(block)[:50]} do not match rows of {width}")
    weight = module.take("weight", ["U8"])
    if math.prod(weight.shape) != rows * width // 2:
        raise EngineError(f"{module.name} has shape {weight.shape}, which does not match {rows, width}")
    table = module.take("quant_map", ["F32"], (16,)).f32()
    scales = _block_scales(module, state, -(-rows * width // block))
    values = weight.integers().reshape(-1)
    return CodebookTensor((rows, width), values, table, block, scales, tuple(module.parts.values()))


def _block_scales(module: Module, state: Mapping[str, Any], blocks: int) -> BlockScales:
    if "nested_absmax" not in module.parts:
        return BlockScales(module.take("absmax", ["F32"], (blocks,)))
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float):
        raise EngineError(f"{module.name} has nested scales without nested_blocksize or nested_offset")
    return BlockScales(
        module.take("absmax", ["U8"], (blocks,)),
        module.take("nested_quant_map", ["F32"], (256,)).f32(),
        module.take("nested_absmax", ["F32"], (-(-blocks // size),)).f32(),
        size,
        float(offset),
    )


def _state(module: Module, part: str) -> Mapping[str, Any]:
    try:
        state = json.loads(module.take(part, ["U8"]).data.tobytes())
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{module.name}.{part} is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise EngineError(f"{module.name}.{part} does not hold an object")
    return state


def parse(settings: Settings) -> BitsAndBytes:
    """Raises UnsupportedError, naming what is not supported."""
    four, eight = (flag(settings, key, False) for key in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise UnsupportedError("quantization_config has neither load_in_4bit nor load_in_8bit, or both")
    return BitsAndBytes(4 if four else 8)
