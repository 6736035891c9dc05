"""MXFP4 (OCP Microscaling Formats 1.0): floats of 4 bits, e2m1, with a power of two for each 32 of a row.

GPT-OSS's experts have them as `blocks`, of which each byte has two weights, the first in its low half, and `scales`,
exponents as e8m0: both uint8, [rows, groups, 16] and [rows, groups].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.engines.errors import EngineError
from penstock.engines.formats.quantized.integers import Bytes, Floats
from penstock.engines.formats.quantized.settings import Module, Settings, split_modules
from penstock.engines.formats.safetensors_file import StoredTensor

GROUP = 32
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BIAS, _NOT_A_NUMBER = 127, 255


class Mxfp4Layout(Protocol):
    """Where a file keeps the parts of a matrix [rows, width]. All are for rows [start, stop)."""

    @property
    def is_plain(self) -> bool:
        """Whether both parts are views of the file."""
        ...

    def codes(self, start: int, stop: int) -> Bytes:
        """[rows, width / 2]: two in a byte, the first in its low half."""
        ...

    def exponents(self, start: int, stop: int) -> Bytes:
        """[rows, groups], plus 127."""
        ...


@dataclass(frozen=True)
class Mxfp4Tensor:
    """As `StoredTensor`: a weight is value * 2 ** exponent."""

    shape: tuple[int, int]
    layout: Mxfp4Layout
    parts: tuple[StoredTensor, ...]
    """What the file holds of it."""

    bits = 4
    dtype = "mxfp4"

    def rows_f32(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) as float32."""
        codes = self.layout.codes(start, stop)
        values: Floats = np.stack([_VALUES[codes & 15], _VALUES[codes >> 4]], axis=-1)
        grouped = values.reshape(stop - start, -1, GROUP)
        scales = np.ldexp(np.float32(1), self.exponents(start, stop).astype(np.int32) - _BIAS)
        grouped *= scales[:, :, None]
        return grouped.reshape(stop - start, self.shape[1])

    def f32(self) -> Floats:
        return self.rows_f32(0, self.shape[0])

    def exponents(self, start: int, stop: int) -> Bytes:
        """As `Mxfp4Layout.exponents`. Raises EngineError for those that are no numbers."""
        exponents = self.layout.exponents(start, stop)
        if (exponents == _NOT_A_NUMBER).any():
            raise EngineError("the checkpoint has scales of quantized weights that are not finite")
        return exponents


@dataclass(frozen=True)
class _Separate:
    blocks: StoredTensor
    scales: StoredTensor

    is_plain = True

    def codes(self, start: int, stop: int) -> Bytes:
        codes: Bytes = self.blocks.integers()[start:stop].reshape(stop - start, -1)
        return codes

    def exponents(self, start: int, stop: int) -> Bytes:
        exponents: Bytes = self.scales.integers()[start:stop]
        return exponents


@dataclass(frozen=True)
class Mxfp4:
    """It has no settings that count here: what is packed is seen by the tensors."""

    name = "mxfp4"
    bits = 4

    def assemble(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Mxfp4Tensor]:
        """By the names of a checkpoint of floats. Raises EngineError for tensors that do not go together."""
        modules, rest = split_modules(stored, lambda part, tensor: part == "blocks")
        return {**rest, **{f"{module.name}.weight": _tensor(module) for module in modules}}


def _tensor(module: Module) -> Mxfp4Tensor:
    module.check_parts(("blocks", "scales"))
    blocks = module.take("blocks", ["U8"])
    if len(blocks.shape) != 3 or 0 in blocks.shape or 2 * blocks.shape[2] != GROUP:
        raise EngineError(f"{module.name}.blocks has shape {blocks.shape}, which should end in {GROUP // 2}")
    rows, groups, _ = blocks.shape
    scales = module.take("scales", ["U8"], (rows, groups))
    return Mxfp4Tensor((rows, groups * GROUP), _Separate(blocks, scales), (blocks, scales))


def parse(settings: Settings) -> Mxfp4:
    """Of any settings: modules that were not converted are stored as floats."""
    return Mxfp4()
