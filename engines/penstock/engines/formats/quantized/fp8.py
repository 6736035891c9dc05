"""Checkpoints in 8-bit floats: `weight`, and `weight_scale`, or `weight_scale_inv` as DeepSeek calls it. Despite that
name weights are multiplied by both. Scales of activations are left out: activations are rounded here by their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.quantized.settings import Module, Settings, choice, split_modules
from penstock.engines.formats.safetensors_file import FLOATS, Shape, StoredTensor


@dataclass(frozen=True)
class Float8Tensor:
    """As `StoredTensor`, of 8-bit floats: a weight is value * scale."""

    shape: tuple[int, int]
    block: tuple[int, int]
    """Rows and columns that share a scale; those at the end may be fewer."""
    scales: npt.NDArray[np.float32]
    """For each block."""
    values: npt.NDArray[np.uint8]
    """[rows, width]"""
    parts: tuple[StoredTensor, ...]
    """What the file holds of it."""

    bits = 8
    dtype = "fp8"

    def rows_f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) as float32."""
        height, width = self.block
        scales = self.scales[np.arange(start, stop) // height]
        rows = _VALUES[self.values[start:stop]]
        if scales.shape[1] == 1:
            return np.multiply(rows, scales, out=rows)
        return np.multiply(rows, np.repeat(scales, width, axis=1)[:, : self.shape[1]], out=rows)

    def f32(self) -> npt.NDArray[np.float32]:
        return self.rows_f32(0, self.shape[0])


def _all_values() -> npt.NDArray[np.float32]:
    """By the byte: a sign, four bits of exponent, three of mantissa; all ones are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -values, values).astype(np.float32)


_VALUES = _all_values()


ACTIVATION_PARTS = ("input_scale", "input_zero_point", "input_scale_ub", "output_scale")
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale")
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class FP8:
    """What quantization_config says."""

    name: str
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: all of the matrix do, or each row has its own."""

    bits = 8

    def assemble(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Float8Tensor]:
        """By the names of a checkpoint of floats. Raises EngineError for tensors that do not go together."""
        modules, rest = split_modules(without_kv_scales(stored), lambda part, tensor: tensor.dtype == "F8_E4M3")
        return rest | {f"{module.name}.weight": float8_matrix(module, self.block) for module in modules}


def float8_matrix(module: Module, block: tuple[int, int] | None) -> Float8Tensor:
    """Raises EngineError for tensors that do not go together."""
    module.check_parts(("weight", *_SCALES, *ACTIVATION_PARTS))
    weight = module.matrix("weight", ["F8_E4M3"])
    scale = module.take(next((part for part in _SCALES if part in module.parts), _SCALES[0]), FLOATS)
    rows, width = weight.shape
    chosen = _block(scale.shape, rows, width, block)
    if chosen is None:
        raise EngineError(f"{module.name}: scales {scale.shape} do not match the matrix {weight.shape}")
    scales = scale.f32().reshape(-(-rows // chosen[0]), -1)
    if not np.isfinite(scales).all():
        raise EngineError(f"{module.name} has scales that are not finite")
    return Float8Tensor((rows, width), chosen, scales, weight.integers(), (weight, scale))


def _block(scales: Shape, rows: int, width: int, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of one of `scales`; None: these do not go with the matrix."""
    if scales in ((), (1,), (1, 1)):
        return rows, width
    if block is not None and scales == (-(-rows // block[0]), -(-width // block[1])):
        return block
    return (1, width) if scales in ((rows,), (rows, 1)) else None


def without_kv_scales(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Without scales for an fp8 cache of keys and values: the cache here has its own."""
    return {name: tensor for name, tensor in stored.items() if not name.endswith(KV_SCALES)}


def parse(settings: Settings) -> FP8:
    """Raises UnsupportedError, naming what is not supported."""
    choice(settings, ["fmt"], ["e4m3"], "e4m3")
    block = settings.get("weight_block_size")
    return FP8(str(settings["quant_method"]), None if block is None else block_of(block))


def block_of(setting: Any) -> tuple[int, int]:
    """Of [128, 128], or "128x128". Raises UnsupportedError."""
    sizes = setting.split("x") if isinstance(setting, str) else setting
    try:
        height, width = (int(size) for size in sizes)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise UnsupportedError(f"quantization_config has blocks of {str(setting)[:50]}, which are not two sizes")
    return height, width
