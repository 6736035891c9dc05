"""Contents of KV cache blocks that lie in several pieces of memory, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class BlockRows:
    def __init__(self, pieces: Sequence[Bytes]) -> None:
        """Of each piece of memory, [num_blocks, bytes of a block]."""
        self._pieces = pieces

    @property
    def block_bytes(self) -> int:
        """`BlockHost.block_bytes`"""
        return sum(piece.shape[1] for piece in self._pieces)

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """`BlockHost.read_blocks`: piece by piece."""
        chosen = np.array(block_ids)
        contents = np.empty((len(chosen), self.block_bytes), np.uint8)
        begin = 0
        for piece in self._pieces:
            end = begin + piece.shape[1]
            contents[:, begin:end] = piece[chosen]
            begin = end
        return contents

    def write(self, block_ids: Sequence[int], contents: Sequence[Bytes]) -> None:
        """`BlockHost.write_blocks`"""
        for block_id, block in zip(block_ids, contents, strict=True):
            begin = 0
            for piece in self._pieces:
                end = begin + piece.shape[1]
                piece[block_id] = block[begin:end]
                begin = end
