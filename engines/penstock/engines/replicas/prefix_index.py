"""Which blocks of prompts a replica has been sent: what its prefix cache probably holds."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kvcache import BlockHash

_MOST_BLOCKS = 1 << 17
"""Whatever the size of the KV cache: an entry takes about 100 bytes."""


class PrefixIndex:
    """Remembers as many blocks as the replica's KV cache has, and forgets in the order in which a prefix cache evicts:
    what was used least recently first, and of one prompt its end before its beginning."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = min(num_blocks, _MOST_BLOCKS)
        self._blocks: dict[BlockHash, None] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of a prompt it knows."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._blocks:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """The replica has been sent a prompt with these blocks."""
        blocks = self._blocks
        for block_hash in reversed(hashes[: self._capacity]):
            blocks.pop(block_hash, None)
            blocks[block_hash] = None
        while len(blocks) > self._capacity:
            del blocks[next(iter(blocks))]

    def clear(self) -> None:
        """Its prefix cache is empty."""
        self._blocks.clear()
