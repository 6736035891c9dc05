"""ggml's blocks of MXFP4: an exponent, then 16 bytes, of which byte j has weight j in its low half and weight j + 16 in
its high one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.formats.quantized.integers import Bytes

_BLOCK_BYTES = 17


@dataclass(frozen=True)
class Mxfp4Blocks:
    """As `mxfp4.Layout`."""

    rows: Bytes
    """[rows, bytes of a row]"""
    order: npt.NDArray[np.intp] | None = None
    """Where in `rows` each row is; None: in order."""

    is_plain = False

    def codes(self, start: int, stop: int) -> Bytes:
        halves = self._blocks(start, stop)[..., 1:]
        first, second = halves[..., 0::2], halves[..., 1::2]
        low, high = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
        return np.concatenate([low, high], axis=-1).reshape(stop - start, -1).view(np.uint8)

    def exponents(self, start: int, stop: int) -> Bytes:
        found: Bytes = self._blocks(start, stop)[..., 0]
        return found

    def _blocks(self, start: int, stop: int) -> Bytes:
        rows = self.rows[start:stop] if self.order is None else self.rows[self.order[start:stop]]
        return rows.reshape(stop - start, -1, _BLOCK_BYTES)
