"""Block hashes that are cheap, since nobody attacks a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kvcache import BlockHash, BlockHasher

_BYTES = 8


class QuickHasher(BlockHasher):
    """64 bits of Python's own hash in place of keyed BLAKE2b."""

    def block(self, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        return hash((parent, tuple(token_ids))).to_bytes(_BYTES, "little", signed=True)
