"""Matrices of integers, as a checkpoint has them: levels, and for each group of columns a zero point and a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import EngineError
from penstock.engines.formats.safetensors_file import StoredTensor

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Zeros = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
Floats = npt.NDArray[np.float32]


class IntegerLayout(Protocol):
    """Where the tensors of one format keep the parts of a matrix [rows, width]. All are for rows [start, stop)."""

    def levels(self, start: int, stop: int) -> Bytes:
        """[rows, width], from 0."""
        ...

    def zeros(self, start: int, stop: int) -> Zeros:
        """[rows, groups]: the levels that stand for 0, of which a file may have some that no weight has."""
        ...

    def scales(self, start: int, stop: int) -> Floats:
        """[rows, groups]"""
        ...


@dataclass(frozen=True)
class IntegerTensor:
    """As `StoredTensor`, of integers: a weight is (level - zero) * scale."""

    bits: int
    """Of a level: 2, 4 or 8."""
    shape: tuple[int, int]
    num_groups: int
    group_of: npt.NDArray[np.int64] | None
    """Of each column; None: consecutive columns are a group, all groups are equally wide."""
    layout: IntegerLayout
    parts: tuple[StoredTensor, ...]
    """What the file holds of it."""

    @property
    def dtype(self) -> str:
        return f"int{self.bits}"

    def rows_f32(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) as float32."""
        values = self.layout.levels(start, stop).astype(np.float32)
        zeros = self.layout.zeros(start, stop).astype(np.float32)
        scales = self.scales(start, stop)
        if self.group_of is not None:
            return (values - zeros[:, self.group_of]) * scales[:, self.group_of]
        grouped = values.reshape(stop - start, self.num_groups, -1)
        grouped -= zeros[:, :, None]
        grouped *= scales[:, :, None]
        return values

    def scales(self, start: int, stop: int) -> Floats:
        """As `IntegerLayout.scales`. Raises EngineError for those that are not finite."""
        scales = self.layout.scales(start, stop)
        if not np.isfinite(scales).all():
            raise EngineError("the checkpoint has scales of quantized weights that are not finite")
        return scales

    def f32(self) -> Floats:
        return self.rows_f32(0, self.shape[0])


def unpacked(words: Words, bits: int) -> Bytes:
    """[..., n] words as [..., n * 32 / bits] levels; the lowest bits come first."""
    parts = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return parts
    per_byte = 8 // bits
    levels = np.empty((*parts.shape, per_byte), np.uint8)
    for n in range(per_byte):
        levels[..., n] = (parts >> (n * bits)) & ((1 << bits) - 1)
    return levels.reshape(*parts.shape[:-1], -1)


def groups_of_columns(
    name: str, width: int, num_groups: int, group_size: int, stored: npt.NDArray[np.integer] | None = None
) -> npt.NDArray[np.int64] | None:
    """`IntegerTensor.group_of`; `stored`, of each column, takes precedence over `group_size`.

    Raises EngineError for groups that are not among `num_groups`.
    """
    regular = np.arange(width) // max(1, group_size)
    columns = regular if stored is None else stored.astype(np.int64)
    if len(columns) != width or not width or columns.min() < 0 or columns.max() >= num_groups:
        raise EngineError(f"{name}: {width} columns do not go into {num_groups} groups of {group_size}")
    if width % num_groups == 0 and np.array_equal(columns, np.arange(width) // (width // num_groups)):
        return None
    return columns
