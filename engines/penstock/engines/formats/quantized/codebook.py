"""Matrices of 4-bit floats: of each weight the place in a table of 16 values, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.formats.safetensors_file import StoredTensor

Floats = npt.NDArray[np.float32]


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
        found = np.stack([self.table[codes >> 4], self.table[codes & 15]], axis=1).reshape(-1)
        first = begin // self.block
        scales = self.scales.blocks(first, -(-end // self.block)).repeat(self.block)
        found *= scales[begin - first * self.block : end - first * self.block]
        return found.reshape(stop - start, width)

    def f32(self) -> Floats:
        return self.rows_f32(0, self.shape[0])
