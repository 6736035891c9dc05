"""Contents of KV cache blocks that lie in several pieces of memory, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class BlockRows:
    def __init__(self, pieces: Sequence[Bytes]) -> None:
        """Of each piece of memory, [num_blocks, bytes of a block]."""
        self.block_bytes: int = sum(piece.shape[1] for piece in pieces)
        """`BlockHost.block_bytes`"""
        ends = accumulate(piece.shape[1] for piece in pieces)
        self._parts = [(piece, slice(end - piece.shape[1], end)) for piece, end in zip(pieces, ends, strict=True)]
        """With the place of each piece's bytes among those of a block."""

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """`BlockHost.read_blocks`: piece by piece."""
        chosen = np.array(block_ids)
        contents = np.empty((len(chosen), self.block_bytes), np.uint8)
        for piece, part in self._parts:
            contents[:, part] = piece[chosen]
        return contents

    def write(self, block_ids: Sequence[int], contents: Sequence[Bytes]) -> None:
        """`BlockHost.write_blocks`"""
        for block_id, block in zip(block_ids, contents, strict=True):
            for piece, part in self._parts:
                piece[block_id] = block[part]


class StateParts:
    """Rows of recurrent states in the form of blocks (`BlockHost.row_parts`); a row's last part ends with zeros."""

    def __init__(self, rows: BlockRows, block_bytes: int) -> None:
        self._rows = rows
        self._block_bytes = block_bytes
        self.count = -(-rows.block_bytes // block_bytes)
        """Of a row."""

    def read(self, numbers: Sequence[int]) -> Bytes:
        """Parts are counted through all rows."""
        whole = self._whole(numbers)
        contents = np.zeros((len(numbers), self._block_bytes), np.uint8)
        for content, number in zip(contents, numbers, strict=True):
            part = whole[number // self.count][self._place(number)]
            content[: len(part)] = part
        return contents

    def write(self, numbers: Sequence[int], contents: Sequence[Bytes]) -> None:
        whole = self._whole(numbers)
        for number, content in zip(numbers, contents, strict=True):
            part = whole[number // self.count][self._place(number)]
            part[:] = content[: len(part)]
        self._rows.write(list(whole), list(whole.values()))

    def _whole(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """The rows of these parts."""
        chosen = list(dict.fromkeys(number // self.count for number in numbers))
        return dict(zip(chosen, self._rows.read(chosen), strict=True)) if chosen else {}

    def _place(self, number: int) -> slice:
        first = number % self.count * self._block_bytes
        return slice(first, first + self._block_bytes)
