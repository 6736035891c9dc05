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
