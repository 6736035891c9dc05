"""Matrices of 8-bit floats (e4m3, without infinities), with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.formats.safetensors_file import StoredTensor


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
        found = _VALUES[self.values[start:stop]]
        if scales.shape[1] == 1:
            return np.multiply(found, scales, out=found)
        return np.multiply(found, np.repeat(scales, width, axis=1)[:, : self.shape[1]], out=found)

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
