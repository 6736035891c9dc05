"""The KV cache manager: block tables over one pool, with prefix sharing and copy on write.

Ownership: a table holds one reference to each of its blocks. A block may be shared between tables, and between tables
and the prefix cache; it is written only by a sole holder while it is not in the cache (BlockPool.is_writable).
The tensors live in the runners; here are block ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.kvcache.hashing import BlockHasher
from penstock.kvcache.pool import BlockHash, BlockPool, require
from penstock.kvcache.table import BlockTable, Growth


class KVCacheManager:
    """Gives blocks to requests, in tokens: callers say which positions they are going to write."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._hasher = hasher or BlockHasher()
        self._tables: set[BlockTable] = set()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0..1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def admit(
        self,
        token_ids: Sequence[int],
        *,
        adapter: str = "",
        salt: str = "",
        reserve: int = 0,
        read_cache: bool = True,
        known_hashes: list[BlockHash] | None = None,
    ) -> tuple[BlockTable, int, tuple[int, int] | None] | None:
        """A table with room for all of `token_ids`: (table, number of leading tokens found in the cache, block copy).

        At least one token is left to compute, since its logits are wanted: after a hit on every token the last block is
        copied, as Growth.copy. None, and nothing changes, unless `reserve` blocks would stay free.

        `known_hashes` is the caller's memory of earlier calls for the same tokens and keys, extended here: a long
        prompt that has to try again in every step is hashed once.
        """
        if reserve >= self.pool.num_free:  # whoever has something to compute needs a block
            return None
        table = BlockTable(self._hasher.root(adapter=adapter, salt=salt))
        cached: list[int] = []
        if read_cache and self.enable_prefix_caching:
            cached = self._match(table, token_ids, [] if known_hashes is None else known_hashes)
        num_computed = min(len(cached) * self.block_size, len(token_ids) - 1)
        copied = num_computed < len(cached) * self.block_size
        needed = self.blocks_for(len(token_ids)) - len(cached) + copied
        self.pool.retain(cached)  # before counting what is free: a cached block must not count as both
        if needed + reserve > self.pool.num_free:
            self.pool.release(cached[::-1])
            return None
        table.block_ids = list(cached)
        table.capacity = num_computed // self.block_size * self.block_size
        self._await_next_full_block(table)
        self._tables.add(table)
        growth = self.grow(table, num_computed, len(token_ids))
        return table, num_computed, growth.copy if growth else None

    def _match(self, table: BlockTable, token_ids: Sequence[int], hashes: list[BlockHash]) -> list[int]:
        """Cached blocks of the longest known prefix; their hashes go into the table."""
        size, found = self.block_size, []
        for index in range(len(token_ids) // size):
            if index == len(hashes):
                tokens = token_ids[index * size : (index + 1) * size]
                hashes.append(self._hasher.block(hashes[-1] if hashes else table.root, tokens))
            block_id = self.pool.lookup(hashes[index])
            if block_id is None:
                break
            found.append(block_id)
        table.hashes = hashes[: len(found)]
        return found

    def grow(self, table: BlockTable, start: int, end: int) -> Growth | None:
        """Makes positions start..end-1 writable. None when the pool cannot give what that needs; nothing changes then.

        Below `table.capacity` no call is needed.
        """
        blocks, first = table.block_ids, start // self.block_size
        shared = first < len(blocks) and not self.pool.is_writable(blocks[first])
        missing = max(0, self.blocks_for(end) - len(blocks))
        if missing + shared > self.pool.num_free:
            return None
        index, copy = len(blocks), None
        fresh = self.pool.allocate(missing + shared)
        if shared:
            index, copy = first, (blocks[first], fresh[0])
            self.pool.release([blocks[first]])
            blocks[first] = fresh.pop(0)
            del table.hashes[first:]
            self._await_next_full_block(table)
        blocks.extend(fresh)
        table.capacity = len(blocks) * self.block_size
        return Growth(index, blocks[index:], copy)

    def fork(self, parent: BlockTable, num_computed: int) -> BlockTable:
        """A second table over the parent's first `num_computed` positions, with no block of its own yet.

        Whoever of the two writes into the last, partly filled block first gets a copy of it (`grow`).
        """
        count = self.blocks_for(num_computed)
        full = num_computed // self.block_size
        child = BlockTable(
            parent.root,
            parent.block_ids[:count],
            parent.hashes[:full],
            capacity=full * self.block_size,
        )
        self._await_next_full_block(child)
        parent.capacity = min(parent.capacity, full * self.block_size)
        self.pool.retain(child.block_ids)
        self._tables.add(child)
        return child

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Offers the blocks that `num_computed` tokens fill to the prefix cache.

        Only for tokens whose step succeeded: what a failed step left in a block must never be found again.
        """
        size, hashes = self.block_size, table.hashes
        while len(hashes) < num_computed // size:
            index = len(hashes)
            tokens = token_ids[index * size : (index + 1) * size]
            hashes.append(self._hasher.block(hashes[-1] if hashes else table.root, tokens))
            self.pool.publish(table.block_ids[index], hashes[-1])
        self._await_next_full_block(table)

    def _await_next_full_block(self, table: BlockTable) -> None:
        if self.enable_prefix_caching:
            table.next_publish = (len(table.hashes) + 1) * self.block_size

    def free(self, table: BlockTable) -> None:
        """Gives the table's blocks back, last block first: a prefix's tail is evicted before its head."""
        self._tables.remove(table)
        self.pool.release(table.block_ids[::-1])
        table.block_ids = []
        table.capacity = 0

    def check_integrity(self) -> None:
        """Raises IntegrityError unless references, tables and pool agree (conservation and reference counts)."""
        self.pool.check_integrity()
        held = Counter(block_id for table in self._tables for block_id in table.block_ids)
        for block_id in range(self.pool.num_blocks):
            require(self.pool.ref_count(block_id) == held[block_id], f"block {block_id}: wrong reference count")
        for table in self._tables:
            require(len(set(table.block_ids)) == len(table.block_ids), "a table names a block twice")
            require(table.capacity <= len(table.block_ids) * self.block_size, "capacity without blocks")
