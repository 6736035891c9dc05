"""The KV cache manager: block tables over one pool, with prefix sharing, copy on write, and windows.

Ownership: a table holds one reference to each of its blocks. A block may be shared between tables, and between tables
and the prefix cache; it is written only by a sole holder while it is not in the cache (BlockPool.is_writable).
The tensors live in the runners; here are block ids only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.kvcache.cache_log import CacheLog
from penstock.kvcache.hashing import (
    AttachedChain,
    Attachment,
    BlockHasher,
    Chains,
    HashChain,
    group_and_hash,
    group_key,
)
from penstock.kvcache.integrity import require
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.prefixes import ComputingPrompts, PrefixMatcher
from penstock.kvcache.retention import Retention
from penstock.kvcache.table import NO_BLOCK, BlockTable, BlockTables, Growth, KVGroup, blocks_of_request
from penstock.kvcache.tier import BlockSave, BlockSource, BlockTier

_NOTHING: Mapping[BlockHash, Any] = MappingProxyType({})


class KVCacheManager:
    """Gives blocks to requests. Callers count in tokens: they say which positions they are going to write.

    A manager of more than blocks (`HybridCacheManager`) extends public methods only: it does its own part, and leaves
    the blocks to these.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroup],
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
        tier: BlockTier | None = None,
        source: BlockSource | None = None,
    ) -> None:
        """`tier` takes in the blocks that the prefix cache evicts; None: they are lost. `source` has contents of blocks
        that the pool does not have; None: the tier is the source."""
        if not groups:
            raise ValueError("a KV cache needs at least one group of layers")
        self.groups = tuple(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.rows: BlockPool | None = None
        """Of recurrent states; None: the model has none."""
        self.tier = tier
        self.source = tier if source is None else source
        self.in_use: dict[BlockHash, None] | None = None
        """Blocks that were published, or found in the prefix cache for a request, since this was last emptied; None:
        not noted."""
        if tier is not None:
            self.pool.evicted = []
        self._log: CacheLog | None = None
        self._hasher = hasher or BlockHasher()
        self.holders: set[BlockTables] = set()
        """All tables that `admit` and `fork` have given and that were not freed."""
        self.computing = ComputingPrompts(self.pool, enabled=enable_prefix_caching)
        self.prefixes = PrefixMatcher(self.groups, self.pool)
        """Finds what of a prompt is cached."""

    def chains(self, *, adapter: str = "", salt: str = "", attachments: Sequence[Attachment] = ()) -> Chains:
        """Hash chains for a new sequence of tokens, whose owner keeps them as long as it appends to the sequence.
        `attachments`: as `AttachedChain` has them."""
        root = self._hasher.root(adapter=adapter, salt=salt)
        sizes = {group.block_size for group in self.groups}
        by_size = {size: self.new_chain(root, size, adapter, attachments) for size in sizes}
        return tuple(by_size[group.block_size] for group in self.groups)

    def new_chain(self, root: BlockHash, block_size: int, adapter: str, attachments: Sequence[Attachment]) -> HashChain:
        """Behind `root`. The other arguments: as `chains` has them."""
        if attachments:
            return AttachedChain(self._hasher, root, block_size, attachments, adapter=adapter)
        return HashChain(self._hasher, root, block_size, adapter=adapter)

    @property
    def num_free(self) -> int:
        """What can be allocated, of all kinds together."""
        return self.pool.num_free

    @property
    def is_idle(self) -> bool:
        """Nobody holds anything."""
        return self.pool.num_free == self.pool.num_blocks and not self.holders

    def keep_log(self) -> CacheLog:
        """Notes what enters and leaves the prefix cache from now on. The caller has to empty the log after each
        step."""
        self._log = log = CacheLog()
        self.pool.on_eviction = lambda key: log.removed(*group_and_hash(key))
        return log

    # -- a prompt comes in -----------------------------------------------------------------------------------

    def admit(
        self,
        token_ids: Sequence[int],
        chains: Chains,
        chunk: int,
        *,
        reserve: int = 0,
        read_cache: bool = True,
        fetched: Mapping[BlockHash, Any] = _NOTHING,
    ) -> tuple[BlockTables, int] | None:
        """(tables in which the next `chunk` tokens can be computed, how many leading tokens are cached). Groups without
        a window get blocks for all of `token_ids`. None, and nothing changes, unless `reserve` blocks would stay free
        once each group has all that it needs at a time.

        `fetched`: contents of blocks from the source, which count as cached; the tables' `loads` name those that are
        used.

        At least one token is left to compute, since its logits are needed. If every token is cached, the last block is
        copied or, where blocks are short, computed again.
        """
        if reserve >= self.pool.num_free:  # there is always something to compute, which needs a block
            return None
        length = len(token_ids)
        read_cache = read_cache and self.enable_prefix_caching
        matched = self.prefixes.match(token_ids, chains, length, fetched) if read_cache else 0
        admitted = self.admit_behind(matched, length, chains, chunk, reserve, fetched)
        if admitted is None and matched == length:
            matched = self.prefixes.match(token_ids, chains, length - 1, fetched)
            admitted = self.admit_behind(matched, length, chains, chunk, reserve, fetched)
        return admitted

    def admit_behind(
        self,
        matched: int,
        length: int,
        chains: Chains,
        chunk: int,
        reserve: int,
        fetched: Mapping[BlockHash, Any],
    ) -> tuple[BlockTables, int] | None:
        """`admit`, of a prompt with `length` tokens whose first `matched` ones are cached."""
        start = min(matched, length - 1)
        tables = BlockTables([BlockTable(group, g, chains[g]) for g, group in enumerate(self.groups)])
        needed = 0
        for table in tables.tables:
            needed += self._take_cached(table, matched, start)
            needed += self._blocks_ahead(table, length, chunk) + (start < matched)
        if needed + reserve > self.pool.num_free:
            for table in tables.tables:
                self.pool.release([block_id for block_id in table.held[::-1] if block_id != NO_BLOCK])
            return None
        self.holders.add(tables)
        if self.in_use is not None:
            for table in tables.tables:
                self.in_use.update(dict.fromkeys(table.keys(table.first, len(table.block_ids))))
        if fetched:
            for table in tables.tables:
                tables.loads += self._take_fetched(table, fetched)
        end = min(length, start + chunk)
        self._grow_tables(tables, start, [end if table.group.window else length for table in tables.tables])
        self._set_thresholds(tables)
        return tables, start

    def _blocks_ahead(self, table: BlockTable, length: int, chunk: int) -> int:
        """Blocks that the group will need at once, in addition to the matched ones that it holds."""
        blocks = -(-length // table.group.block_size) - len(table.block_ids)
        if table.group.window:
            blocks = min(blocks, blocks_of_request((table.group,), length, chunk) - len(table.held))
        return max(0, blocks)

    def _take_cached(self, table: BlockTable, matched: int, start: int) -> int:
        """Puts the matched blocks into the table that the token at position `start` and later ones read. Returns how
        many are not in the pool: NO_BLOCK is in their places, for `_take_fetched`."""
        count = matched // table.group.block_size
        table.first = min(table.group.first_block(start), count)
        block_ids = [self.pool.lookup(key) for key in table.keys(table.first, count)]
        cached = [block_id for block_id in block_ids if block_id is not None]
        self.pool.retain(cached)  # before counting what is free: a cached block must not count as both
        table.block_ids = [NO_BLOCK] * table.first + [
            NO_BLOCK if block_id is None else block_id for block_id in block_ids
        ]
        table.num_published = count
        return len(block_ids) - len(cached)

    def _take_fetched(self, table: BlockTable, fetched: Mapping[BlockHash, Any]) -> list[tuple[int, Any]]:
        """Gives the table the matched blocks that are not in the pool. Returns them with their contents. They are
        published like computed ones, once a step has succeeded."""
        entries = [i for i in range(table.first, len(table.block_ids)) if table.block_ids[i] == NO_BLOCK]
        if not entries:
            return []
        blocks = self.pool.allocate(len(entries))
        for entry, block_id in zip(entries, blocks, strict=True):
            table.block_ids[entry] = block_id
        table.num_published = entries[0]
        hashes = [group_key(table.chain.hashes[entry], table.index) for entry in entries]
        return [(block_id, fetched[block_hash]) for block_id, block_hash in zip(blocks, hashes, strict=True)]

    # -- what is behind the pool, or beside it ---------------------------------------------------------------

    def missing(self, token_ids: Sequence[int], chains: Chains, most: int) -> list[tuple[BlockHash, int]]:
        """(hash, slot) of each block that only the source has and that would lengthen this prompt's cached prefix, as
        far as `most` blocks go."""
        source, limit = self.source, len(token_ids)
        if source is None or source.is_empty or not self.enable_prefix_caching:
            return []
        while limit > 0:
            matched = self.prefixes.match(token_ids, chains, limit, source)
            if matched <= self.prefixes.match(token_ids, chains, matched):
                return []
            keys = self.prefixes.not_in_pool(chains, matched, len(token_ids))
            if len(keys) <= most:
                slots = [source.use(key) for key in reversed(keys)]  # beginnings stay longest
                return list(zip(keys, reversed(slots), strict=True))
            limit = min(matched - 1, matched * most // len(keys))
        return []

    def take_saves(self) -> list[BlockSave]:
        """What has been evicted since the last call and the tier takes in. The next step has not been submitted yet: it
        may write to these blocks.

        What was evicted last comes first: of a prefix that is its beginning, without which the rest is of no use.
        """
        evicted, saves = self.pool.evicted, []
        if self.tier is not None and evicted:
            for block_id, block_hash in reversed(evicted):
                slot = self.tier.reserve(block_hash)
                if slot is not None:
                    saves.append(BlockSave(block_id, slot, block_hash))
            evicted.clear()
        return saves

    def find(self, key: BlockHash) -> int | None:
        """The id of what the prefix cache has for this key of the tier or the source."""
        return self.pool.lookup(key)

    def cached_blocks(self) -> list[tuple[int, BlockHash]]:
        """(id, key) of all that the prefix cache has, what is used last first."""
        return self.pool.cached_blocks()

    def clear_cache(self) -> None:
        """Empties the prefix cache, and the tier. Blocks in use stay with their holders."""
        self.pool.clear_cache()
        if self._log is not None:
            self._log.cleared()
        if self.tier is not None and self.pool.evicted is not None:
            self.pool.evicted.clear()
            self.tier.clear()

    # -- tokens come in --------------------------------------------------------------------------------------

    def grow(self, tables: BlockTables, start: int, end: int) -> Growth | None:
        """Makes positions start..end-1 writable. None when the pool cannot give what that needs; nothing changes then.

        Below `tables.capacity` no call is needed.
        """
        needed = 0
        for table in tables.tables:
            needed += max(0, -(-end // table.group.block_size) - len(table.block_ids)) + self._must_copy(table, start)
        if needed > self.pool.num_free:
            return None
        return self._grow_tables(tables, start, [end] * len(tables.tables))

    def _must_copy(self, table: BlockTable, start: int) -> bool:
        """Others hold the block of position `start`, or could find it in the prefix cache."""
        first = start // table.group.block_size
        return first < len(table.block_ids) and not self.pool.is_writable(table.block_ids[first])

    def _grow_tables(self, tables: BlockTables, start: int, ends: Sequence[int]) -> Growth:
        growth = Growth([], [])
        capacity = sys.maxsize
        for table, end in zip(tables.tables, ends, strict=True):
            size, blocks = table.group.block_size, table.block_ids
            first = len(blocks)
            missing = -(-end // size) - first
            if start // size < first and self._must_copy(table, start):
                first = start // size
                (fresh,) = self.pool.allocate(1)
                growth.copies.append((blocks[first], fresh))
                blocks[first] = fresh
                table.num_published = min(table.num_published, first)
            if missing > 0:
                blocks += self.pool.allocate(missing)
            if first < len(blocks):
                growth.updates.append((table.index, first, blocks[first:]))
            capacity = min(capacity, len(blocks) * size)
        tables.capacity = capacity
        if growth.copies:
            tables.copies += growth.copies
            self._set_thresholds(tables)
        return growth

    def copied(self, tables: BlockTables) -> None:
        """A step has made all of `tables.copies`."""
        self.pool.release([source for source, _ in tables.copies])
        tables.copies.clear()

    def loaded(self, tables: BlockTables) -> None:
        """A step has succeeded that began with `tables.loads`."""
        tables.loads.clear()

    def _set_thresholds(self, tables: BlockTables) -> None:
        publish, trim = sys.maxsize, sys.maxsize
        for table in tables.tables:
            size, window = table.group.block_size, table.group.window
            publish = min(publish, (table.num_published + 1) * size)
            if window:
                trim = min(trim, (table.first + 1) * size + window - 1)
        tables.next_trim = trim
        if self.enable_prefix_caching:
            tables.next_publish = publish

    def publish(self, tables: BlockTables, token_ids: Sequence[int], num_computed: int) -> None:
        """Offers the blocks that `num_computed` tokens fill to the prefix cache.

        Only for tokens whose step succeeded: what a failed step left in a block must never be found again.
        """
        for table in tables.tables:
            start, count = table.num_published, num_computed // table.group.block_size
            if count <= start:
                continue
            hashes = table.chain.hashes
            table.chain.extend(token_ids, count)
            first = max(start, table.first)
            keys = table.keys(first, count)
            new = [
                self.pool.publish(block_id, key)
                for block_id, key in zip(table.block_ids[first:count], keys, strict=True)
            ]
            if self.in_use is not None:
                self.in_use.update(dict.fromkeys(keys))
            if self._log is not None:
                self._log.published(table, token_ids, first, new)
            if not table.index:
                self.computing.published(hashes[start:count])
            table.num_published = count
        self._set_thresholds(tables)

    def keep(self, chains: Chains, num_tokens: int, retention: Retention, now: float) -> None:
        """The cached blocks of a sequence's first `num_tokens` are evicted later than others' (`BlockPool.mark`)."""
        keys = []
        for g, chain in enumerate(chains):
            size = chain.block_size
            keys += [
                (i * size, group_key(block_hash, g)) for i, block_hash in enumerate(chain.hashes[: num_tokens // size])
            ]
        if len(chains) > 1:
            keys.sort()  # a beginning is of use only if all groups have it
        self.pool.mark([key for _, key in keys], retention, now)

    def trim(self, tables: BlockTables, num_computed: int) -> None:
        """Gives back the blocks that no token from position `num_computed` on reads."""
        for table in tables.tables:
            first = min(table.group.first_block(num_computed), len(table.block_ids))
            if first > table.first:
                self.pool.release(table.block_ids[table.first : first])
                table.block_ids[table.first : first] = [NO_BLOCK] * (first - table.first)
                table.first = first
        self._set_thresholds(tables)

    def fork(self, parent: BlockTables, num_computed: int) -> tuple[BlockTables, Chains]:
        """Second tables over the parent's first `num_computed` positions, with no block of their own yet, and the
        chains of the new sequence. The parent's copies are made, and it was not trimmed beyond these positions.

        Of the two, the first that writes into the last, partly filled block gets a copy of it (`grow`).
        """
        branches: dict[int, HashChain] = {}
        children = []
        for table in parent.tables:
            size = table.group.block_size
            chain = branches.setdefault(size, table.chain.branch(num_computed))
            child = BlockTable(table.group, table.index, chain)
            child.first = table.first
            child.block_ids = table.block_ids[: -(-num_computed // size)]
            child.num_published = min(table.num_published, num_computed // size)
            self.pool.retain(child.held)
            children.append(child)
        tables = BlockTables(children)
        self._set_thresholds(tables)
        # the next write of either may need a copy, so it has to ask
        parent.capacity = min(parent.capacity, num_computed // self.prefixes.unit * self.prefixes.unit)
        self.holders.add(tables)
        return tables, tuple(child.chain for child in children)

    def checkpoint_before(self, tables: BlockTables, num_computed: int) -> int:
        """The last one of these computed positions from which a sequence can be computed on."""
        return num_computed

    def kept_of(self, num_tokens: int) -> int:
        """How much of a prompt with so many tokens the prefix cache knows at least, once it is computed; whole blocks
        and less than one more."""
        return num_tokens

    def rewind(self, tables: BlockTables, num_computed: int) -> int:
        """Steps are lost that wrote behind the first `num_computed` positions. Returns where to compute on from. Blocks
        behind that which the prefix cache knows are left to it: their tokens get others."""
        for table in tables.tables:
            count = num_computed // table.group.block_size
            if table.num_published > count:
                self.pool.release(table.block_ids[: count - 1 if count else None : -1])
                del table.block_ids[count:]
                table.num_published = count
                tables.capacity = min(tables.capacity, num_computed)
        self._set_thresholds(tables)
        return num_computed

    def free(self, tables: BlockTables) -> None:
        """Gives the blocks back, last block first: a prefix's tail is evicted before its head."""
        self.holders.remove(tables)
        self.copied(tables)
        self.loaded(tables)
        self.computing.withdraw(tables)
        for table in tables.tables:
            self.pool.release(table.held[::-1])
            table.block_ids = []
            table.first = 0
        tables.capacity = 0

    def check_integrity(self) -> None:
        """Raises IntegrityError unless references, tables and pool agree (conservation and reference counts)."""
        self.pool.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity()
        held = Counter(block for tables in self.holders for table in tables.tables for block in table.held)
        held.update(source for tables in self.holders for source, _ in tables.copies)
        for block_id in range(self.pool.num_blocks):
            require(self.pool.ref_count(block_id) == held[block_id], f"block {block_id}: wrong reference count")
        for tables in self.holders:
            blocks = [block for table in tables.tables for block in table.held]
            require(len(set(blocks)) == len(blocks), "a request names a block twice")
            require(NO_BLOCK not in blocks, "a block in the window is missing")
            for table in tables.tables:
                require(set(table.block_ids[: table.first]) <= {NO_BLOCK}, "a block behind the window is held")
                require(tables.capacity <= len(table.block_ids) * table.group.block_size, "capacity without blocks")
        self.computing.check_integrity(self.holders)
