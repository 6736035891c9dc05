"""Checkpoints of the compressed-tensors library, as llm-compressor writes them.

`weight_packed` [out, in * bits / 32] has words along the inputs, `weight_zero_point` [out * bits / 32, groups] along
the outputs; levels and zero points are signed numbers plus half of their range. Matrices of 8-bit integers and floats
are `weight` as it is. `weight_scale` is [out, groups], or has one number for each row or for the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.quantized.fp8 import (
    ACTIVATION_PARTS,
    Float8Tensor,
    block_of,
    float8_matrix,
    without_kv_scales,
)
from penstock.engines.formats.quantized.integers import (
    Bytes,
    Floats,
    IntegerTensor,
    Zeros,
    groups_of_columns,
    unpacked,
)
from penstock.engines.formats.quantized.settings import Module, Settings, choice, refuse, split_modules
from penstock.engines.formats.safetensors_file import FLOATS, StoredTensor

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_REFUSED = {"transform_config": "rotated weights"}
_PACKED, _PLAIN = ("weight_packed",), ("weight",)
_PARTS = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", *ACTIVATION_PARTS)

Matrix = IntegerTensor | Float8Tensor


@dataclass(frozen=True)
class CompressedTensors:
    """What quantization_config says; sizes of groups are what the tensors say."""

    bits: int
    """The most that a weight has."""
    block: tuple[int, int] | None
    """Rows and columns of an fp8 matrix that share a scale; None: there are no blocks."""

    name = "compressed-tensors"

    def assemble(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | IntegerTensor | Float8Tensor]:
        """By the names of a checkpoint of floats. Raises EngineError for tensors that do not go together."""
        modules, rest = split_modules(without_kv_scales(stored), _is_quantized)
        return rest | {f"{module.name}.weight": self._matrix(module) for module in modules}

    def _matrix(self, module: Module) -> Matrix:
        if "weight_packed" in module.parts:
            return _packed(module)
        return _plain(module) if module.parts["weight"].dtype == "I8" else float8_matrix(module, self.block)


def _is_quantized(part: str, tensor: StoredTensor) -> bool:
    return part == "weight_packed" or (part == "weight" and tensor.dtype in ("I8", "F8_E4M3"))


def _packed(module: Module) -> IntegerTensor:
    module.check_parts((*_PACKED, *_PARTS))
    words = module.matrix("weight_packed", ["I32"])
    said = module.take("weight_shape", ["I64", "I32"], (2,)).integers()
    rows, width = int(said[0]), int(said[1])
    bits = next((bits for bits in (2, 4, 8) if words.shape == (rows, -(-width * bits // 32))), None)
    if bits is None or width < 1:
        raise EngineError(f"{module.name}: weight_shape {rows, width} does not match weight_packed {words.shape}")
    return _tensor(module, bits, (rows, width), words)


def _plain(module: Module) -> IntegerTensor:
    module.check_parts((*_PLAIN, *_PARTS))
    weight = module.matrix("weight", ["I8"])
    rows, width = weight.shape
    return _tensor(module, 8, (rows, width), weight)


def _tensor(module: Module, bits: int, shape: tuple[int, int], weight: StoredTensor) -> IntegerTensor:
    rows, width = shape
    scale = module.take("weight_scale", FLOATS)
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.shape not in ((), (1,), (1, 1), (rows,), (rows, groups)) or not 0 < groups <= width:
        raise EngineError(f"{module.name}: scales {scale.shape} do not match the matrix {shape}")
    order = module.take("weight_g_idx", ["I32", "I64"], (width,)).integers() if "weight_g_idx" in module.parts else None
    if order is not None and (order == -1).any():  # the library's sign that columns are in order
        order = None
    if order is None and width % groups:
        raise EngineError(f"{module.name}: {width} columns do not go into {groups} groups")
    group_of = groups_of_columns(module.name, width, groups, width // groups, order)
    layout = _Layout(bits, shape, groups, weight, scale, _zero_point(module, bits, rows, groups))
    return IntegerTensor(bits, shape, groups, group_of, layout, tuple(module.parts.values()))


def _zero_point(module: Module, bits: int, rows: int, groups: int) -> StoredTensor | None:
    """Packed ones have words along the rows; matrices of integers have theirs as they are."""
    if "weight_zero_point" not in module.parts:
        return None
    if module.parts["weight_zero_point"].dtype == "I32":
        return module.take("weight_zero_point", ["I32"], (-(-rows * bits // 32), groups))
    zeros = module.take("weight_zero_point", ["I8"])
    if zeros.shape not in ((), (1,), (1, 1), (rows,), (rows, groups)):
        raise EngineError(f"{module.name}: zero points {zeros.shape} do not match {groups} groups of {rows} rows")
    return zeros


@dataclass(frozen=True)
class _Layout:
    bits: int
    shape: tuple[int, int]
    num_groups: int
    weight: StoredTensor
    scale: StoredTensor
    zero_point: StoredTensor | None

    def levels(self, start: int, stop: int) -> Bytes:
        stored = self.weight.integers()[start:stop]
        if self.weight.dtype == "I8":
            return stored.view(np.uint8) ^ np.uint8(128)
        return unpacked(stored.view(np.uint32), self.bits)[:, : self.shape[1]]

    def zeros(self, start: int, stop: int) -> Zeros:
        half = 1 << (self.bits - 1)
        if self.zero_point is None:
            return np.full((stop - start, self.num_groups), half, np.uint8)
        stored = self.zero_point.integers()
        if self.zero_point.dtype == "I32":
            return unpacked(stored.view(np.uint32).T, self.bits).T[start:stop]
        zeros: Zeros = self._of_rows(stored.astype(np.int16) + np.int16(half), start, stop)
        return zeros

    def scales(self, start: int, stop: int) -> Floats:
        scales: Floats = self._of_rows(self.scale.f32(), start, stop)
        return scales

    def _of_rows(self, values: Any, start: int, stop: int) -> Any:
        """[rows, groups], of numbers for all rows or for each."""
        whole = values.reshape(-1, self.num_groups)
        return np.broadcast_to(whole, (self.shape[0], self.num_groups))[start:stop]


def parse(settings: Settings) -> CompressedTensors:
    """Raises UnsupportedError, naming what is not supported."""
    refuse(settings, _REFUSED)
    choice(settings, ["format"], _FORMATS, "dense")
    sparsity = settings.get("sparsity_config")
    if sparsity:
        choice(sparsity if isinstance(sparsity, dict) else {"format": sparsity}, ["format"], ["dense"], "dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedError("quantization_config has no config_groups")
    weights = [_weights(name, group) for name, group in groups.items()]
    blocks = {block_of(group.get("block_structure")) for group in weights if group.get("strategy") == "block"}
    blocks |= {
        (1, group["group_size"])
        for group in weights
        if group["type"] == "float" and (group.get("group_size") or -1) > 0
    }
    if len(blocks) > 1:
        raise UnsupportedError("quantization_config has blocks of several sizes, which are not supported")
    return CompressedTensors(max(group["num_bits"] for group in weights), next(iter(blocks), None))


def _weights(name: str, group: Any) -> dict[str, Any]:
    """How a group's weights are quantized."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise UnsupportedError(f"quantization_config has no weights in config_groups.{name}")
    choice(group, ["format"], _FORMATS, "dense")
    kind = choice(weights, ["type"], ["int", "float"], "int")
    bits = choice(weights, ["num_bits"], [2, 4, 8] if kind == "int" else [8], 8)
    choice(weights, ["strategy"], ["tensor", "channel", "group", "block"], "tensor")
    size = weights.get("group_size")
    if size is not None and (type(size) is not int or size < -1):
        raise UnsupportedError(f"quantization_config has group_size={str(size)[:50]}, which is not a number of columns")
    return {**weights, "type": kind, "num_bits": bits}
