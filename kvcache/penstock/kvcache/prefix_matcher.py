"""How much of a prompt is known already: the longest prefix behind which every group of layers has what it reads."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from penstock.kvcache.groups import KVGroup
from penstock.kvcache.hashing import group_key
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.table import Chains, HashChain

_NONE: tuple[BlockHash, ...] = ()


class PrefixMatcher:
    def __init__(self, groups: Sequence[KVGroup], pool: BlockPool) -> None:
        self._groups = groups
        self._pool = pool
        self.unit = math.lcm(*(group.block_size for group in groups))
        """A prefix is a multiple of this many tokens long."""
        self._has_windows = any(group.window for group in groups)

    def match(self, token_ids: Sequence[int], chains: Chains, limit: int, beside: Container[BlockHash] = _NONE) -> int:
        """Tokens of the longest known prefix, at most `limit`: every group has what the token behind it reads, in the
        pool or `beside` it."""
        length = limit // self.unit * self.unit
        for g, group in enumerate(self._groups):
            if not group.window:
                length = self._match_whole(g, chains[g], token_ids, length, beside)
        while self._has_windows and length:
            before = length
            for g, group in enumerate(self._groups):
                if group.window:
                    length = self._match_window(g, chains[g], token_ids, length, beside)
            if length == before:
                break
        return length

    def _match_whole(
        self, g: int, chain: HashChain, token_ids: Sequence[int], length: int, beside: Container[BlockHash]
    ) -> int:
        """Hashes no further than the first miss."""
        size, lookup = chain.block_size, self._pool.lookup
        for index in range(length // size):
            chain.extend(token_ids, index + 1)
            key = group_key(chain.hashes[index], g)
            if lookup(key) is None and key not in beside:
                return index * size // self.unit * self.unit
        return length

    def _match_window(
        self, g: int, chain: HashChain, token_ids: Sequence[int], length: int, beside: Container[BlockHash]
    ) -> int:
        """The longest prefix up to `length` behind which this group's window is cached."""
        group, size = self._groups[g], chain.block_size
        chain.extend(token_ids, length // size)
        last_miss = [-1]  # before each block: the newest one that is not cached
        for index in range(length // size):
            key = group_key(chain.hashes[index], g)
            known = self._pool.lookup(key) is not None or key in beside
            last_miss.append(last_miss[-1] if known else index)
        while length and last_miss[length // size] >= group.first_block(min(length, len(token_ids) - 1)):
            length -= self.unit
        return length

    def not_in_pool(self, chains: Chains, matched: int, length: int) -> list[BlockHash]:
        """Of the blocks that are read behind the first `matched` tokens of a prompt with `length` tokens, those that
        are elsewhere."""
        missing = []
        for g, group in enumerate(self._groups):
            first = group.first_block(min(matched, length - 1))
            keys = [group_key(block_hash, g) for block_hash in chains[g].hashes[first : matched // group.block_size]]
            missing += [key for key in keys if self._pool.lookup(key) is None]
        return missing
