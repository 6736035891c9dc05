"""Prefixes of prompts: how much of one is known already, and what of it another request is computing."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Sequence

from penstock.kvcache.hashing import Chains, HashChain, group_key
from penstock.kvcache.integrity import require
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.table import BlockTables, KVGroup

NO_HASHES: tuple[BlockHash, ...] = ()


class PrefixMatcher:
    """The longest prefix behind which every group of layers has what it reads."""

    def __init__(self, groups: Sequence[KVGroup], pool: BlockPool) -> None:
        self._groups = groups
        self._pool = pool
        self.unit = math.lcm(*(group.block_size for group in groups))
        """A prefix is a multiple of this many tokens long."""
        self._has_windows = any(group.window for group in groups)

    def match(
        self, token_ids: Sequence[int], chains: Chains, limit: int, beside: Container[BlockHash] = NO_HASHES
    ) -> int:
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


Rank = tuple[float, ...]
"""Of a request among those that run or wait: the lower one is ahead."""


class ComputedBlock:
    """A block of a prompt on its way into the prefix cache. Requests with the same prompt may wait for it."""

    __slots__ = ("rank", "tables")

    reason = "same_prompt"
    error = None

    def __init__(self, tables: BlockTables, rank: Rank) -> None:
        self.tables: BlockTables | None = tables
        """Of the request that computes it; None: it is published or given up."""
        self.rank = rank

    @property
    def is_pending(self) -> bool:
        return self.tables is not None


class ComputingPrompts:
    """Blocks of the first group of layers, by their hashes: the other groups' are computed with them."""

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        """`enabled`: blocks are published once they are computed; otherwise waiting for one would be in vain."""
        self._pool = pool
        self._enabled = enabled
        self._by_hash: dict[BlockHash, ComputedBlock] = {}

    def announce(self, tables: BlockTables, token_ids: Sequence[int], rank: Rank) -> None:
        """Tells that those full blocks of these tokens which are not cached are about to be computed. Of two that
        compute the same, the one ahead counts."""
        if not self._enabled:
            return
        table = tables.tables[0]
        count = len(token_ids) // table.group.block_size
        table.chain.extend(token_ids, count)
        for block_hash in table.chain.hashes[table.num_published : count]:
            if self._pool.lookup(block_hash) is None:
                known = self._by_hash.get(block_hash)
                if known is None:
                    self._by_hash[block_hash] = ComputedBlock(tables, rank)
                elif rank < known.rank:
                    known.tables, known.rank = tables, rank

    def find(self, token_ids: Sequence[int], chain: HashChain, rank: Rank) -> ComputedBlock | None:
        """The last block of this prompt that a request ahead of `rank` is computing right behind what is cached, if
        any. Once it is published, or given up, it need not be computed again. `chain`: the first group's."""
        if not self._by_hash:
            return None
        last = None
        for index in range(len(token_ids) // chain.block_size):
            chain.extend(token_ids, index + 1)
            block_hash = chain.hashes[index]
            known = self._by_hash.get(block_hash)
            if known is not None and known.rank < rank:
                last = known
            elif last is not None or self._pool.lookup(block_hash) is None:
                break
        return last

    def published(self, block_hashes: Iterable[BlockHash]) -> None:
        """Others need not compute these any more."""
        for block_hash in block_hashes:
            known = self._by_hash.pop(block_hash, None)
            if known is not None:
                known.tables = None

    def withdraw(self, tables: BlockTables) -> None:
        """What these were going to compute is given up."""
        table = tables.tables[0]
        for block_hash in table.chain.hashes[table.num_published :]:
            known = self._by_hash.get(block_hash)
            if known is not None and known.tables is tables:
                known.tables = None
                del self._by_hash[block_hash]

    def check_integrity(self, holders: Collection[BlockTables]) -> None:
        """Raises IntegrityError unless `holders`, the tables that were given and not freed, compute all of this."""
        for block in self._by_hash.values():
            require(block.tables in holders, "nobody computes an announced block")
