"""Which blocks of prompts are being computed, so that a request with the same prompt can wait for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from penstock.kvcache.integrity import require
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.table import BlockTables, HashChain

Rank = tuple[float, ...]
"""Of a request among those that run or wait: the lower one is ahead."""


class ComputingPrompts:
    """Blocks of the first group of layers, by their hashes: the other groups' are computed with them."""

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        """`enabled`: blocks are published once they are computed; otherwise waiting for one would be in vain."""
        self._pool = pool
        self._enabled = enabled
        self._by_hash: dict[BlockHash, tuple[BlockTables, Rank]] = {}

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._by_hash

    def announce(self, tables: BlockTables, token_ids: Sequence[int], rank: Rank) -> None:
        """Tells that those full blocks of these tokens which are not cached are about to be computed. Of two that
        compute the same, the one ahead counts."""
        if not self._enabled:
            return
        table, own = tables.tables[0], (tables, rank)
        count = len(token_ids) // table.group.block_size
        table.chain.extend(token_ids, count)
        for block_hash in table.chain.hashes[table.num_published : count]:
            if self._pool.lookup(block_hash) is None:
                known = self._by_hash.setdefault(block_hash, own)
                if rank < known[1]:
                    self._by_hash[block_hash] = own

    def find(self, token_ids: Sequence[int], chain: HashChain, rank: Rank) -> BlockHash | None:
        """The last block of this prompt that a request ahead of `rank` is computing right behind what is cached, if
        any. Once it is published, or given up, it need not be computed again. `chain`: the first group's."""
        if not self._by_hash:
            return None
        found = None
        for index in range(len(token_ids) // chain.block_size):
            chain.extend(token_ids, index + 1)
            block_hash = chain.hashes[index]
            known = self._by_hash.get(block_hash)
            if known is not None and known[1] < rank:
                found = block_hash
            elif found is not None or self._pool.lookup(block_hash) is None:
                break
        return found

    def published(self, block_hashes: Iterable[BlockHash]) -> None:
        """Others need not compute these any more."""
        for block_hash in block_hashes:
            self._by_hash.pop(block_hash, None)

    def withdraw(self, tables: BlockTables) -> None:
        """What these were going to compute is given up."""
        table = tables.tables[0]
        for block_hash in table.chain.hashes[table.num_published :]:
            known = self._by_hash.get(block_hash)
            if known is not None and known[0] is tables:
                del self._by_hash[block_hash]

    def check_integrity(self, holders: Collection[BlockTables]) -> None:
        """Raises IntegrityError unless `holders`, the tables that were given and not freed, compute all of this."""
        for tables, _ in self._by_hash.values():
            require(tables in holders, "nobody computes an announced block")
