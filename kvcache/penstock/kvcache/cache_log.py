"""A log of what enters and leaves the prefix cache, for those who keep an index of it elsewhere.

A reader that carries out all entries in order has the same set of hashes as `BlockPool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from penstock.kvcache.pool import BlockHash
from penstock.kvcache.table import BlockTable


class BlocksStored(NamedTuple):
    """Blocks that follow each other in a sequence of tokens. A block that is cached already is not stored again."""

    group: int
    """Of layers: each caches its own part of the same tokens, under the same hashes."""
    hashes: list[BlockHash]
    parent: BlockHash | None
    """Of the block before the first one; None: it is a sequence's first."""
    token_ids: Sequence[int]
    """Of all the blocks, one after the other."""
    block_size: int
    adapter: str
    """The key of the LoRA adapter that computed them; "": none."""
    extra_keys: list[list[str] | None] | None = None
    """Of each block, what it holds beside tokens (`HashChain.extra_keys`)."""


class BlocksRemoved(NamedTuple):
    group: int
    hashes: list[BlockHash]


class CacheCleared(NamedTuple):
    """Nothing is cached any more."""


CacheEntry: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared


class CacheLog:
    """Its owner takes the entries after each step: what a step changes bounds their number."""

    def __init__(self) -> None:
        self._entries: list[CacheEntry] = []

    def published(self, table: BlockTable, token_ids: Sequence[int], first: int, new: Sequence[bool]) -> None:
        """`new` says of each block from `first` on whether it was not cached before."""
        hashes, size, end = table.chain.hashes, table.chain.block_size, first + len(new)
        while first < end:
            run = next((index for index in range(first, end) if not new[index - end]), end)
            if run > first:
                parent = hashes[first - 1] if first else None
                tokens = token_ids[first * size : run * size]
                chain = table.chain
                extra = chain.extra_keys(first, run)
                stored = BlocksStored(table.index, hashes[first:run], parent, tokens, size, chain.adapter, extra)
                self._entries.append(stored)
            first = run + 1

    def removed(self, group: int, block_hash: BlockHash) -> None:
        last = self._entries[-1] if self._entries else None
        if isinstance(last, BlocksRemoved) and last.group == group:
            last.hashes.append(block_hash)
        else:
            self._entries.append(BlocksRemoved(group, [block_hash]))

    def cleared(self) -> None:
        """What was noted before is of no use any more."""
        self._entries = [CacheCleared()]

    def take(self) -> list[CacheEntry]:
        """All entries since the last call, in order."""
        entries, self._entries = self._entries, []
        return entries
