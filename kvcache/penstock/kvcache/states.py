"""Recurrent states in the KV cache: rows of tables, with checkpoints, beside the blocks of attention.

A recurrent layer keeps a state of fixed size in place of keys and values of every token, and it cannot be computed
again in place: the token behind it has changed it. So a request has one more table, of rows. Its entry k is the row
with the state behind the tokens of the k-th interval, as far as they are computed. A row whose interval is full is a
checkpoint: it is never written again, and the prefix cache knows it by the hash of the tokens up to there. The token
that begins the next interval reads it and writes a row of its own.

Outside of the engine a row is as many blocks as its bytes take, its parts: each has a key and an id of its own, the
ids behind those of the pool's blocks.

A request keeps its last checkpoint beside the row in use. What has to go back (a prefix hit, a fork, steps that are
lost) goes back to a checkpoint, and computes the tokens behind it again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.kvcache.hashing import DIGEST_SIZE, Attachment, BlockHasher, Chains, HashChain
from penstock.kvcache.integrity import require
from penstock.kvcache.manager import KVCacheManager
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.prefixes import NO_HASHES, PrefixMatcher
from penstock.kvcache.retention import Retention
from penstock.kvcache.table import NO_BLOCK, BlockTable, BlockTables, Growth, KVGroup
from penstock.kvcache.tier import BlockSave, BlockSource, BlockTier

_KEPT_ROWS = 2
"""Of a request between two steps: its last checkpoint, and the row in use."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """All recurrent layers of a model: one row number holds for the tables of all of them."""

    interval: int
    """Tokens between two checkpoints: a multiple of the block size of every group of attention layers."""
    num_rows: int
    """Of a pool of their own."""

    def __post_init__(self) -> None:
        if self.interval < 1 or self.num_rows < 1:
            raise ValueError(f"no such group of recurrent layers: {self}")

    @property
    def table(self) -> KVGroup:
        """The shape of a request's table of rows: it reaches back to the last checkpoint before a token."""
        return KVGroup(self.interval, self.interval + 1)

    def largest_chunk(self, chunk: int, steps_in_flight: int) -> int:
        """Most tokens of one request in a step, up to `chunk`: all steps under way have rows at the same time. Raises
        ValueError where there are too few rows for a single request."""
        rows = (self.num_rows - _KEPT_ROWS) // steps_in_flight - 1  # a step may begin and end within an interval
        if rows < 1:
            raise ValueError(f"{self.num_rows} rows of states are too few for {steps_in_flight} steps in flight")
        return min(chunk, rows * self.interval)


def part_keys(block_hash: BlockHash, parts: int) -> list[BlockHash]:
    """What the parts of a row are known by. No block of a group has such a key (`group_key`): they are longer."""
    return [block_hash + part.to_bytes(_PART_BYTES) for part in range(parts)]


_PART_BYTES = 3


class CheckpointMatcher(PrefixMatcher):
    """A prefix ends at a checkpoint. One token at least is left to compute: the state behind the last one would be of
    no use for its logits."""

    def __init__(
        self, groups: Sequence[KVGroup], pool: BlockPool, rows: BlockPool, interval: int, parts: int = 0
    ) -> None:
        """`parts` of a row; 0: rows are nowhere else."""
        super().__init__(groups, pool)
        self._rows = rows
        self._interval = interval
        self._parts = parts

    def match(
        self, token_ids: Sequence[int], chains: Chains, limit: int, beside: Container[BlockHash] = NO_HASHES
    ) -> int:
        length = super().match(token_ids, chains, min(limit, len(token_ids) - 1), beside)
        chain, count = chains[-1], length // self._interval
        chain.extend(token_ids, count)
        while count and not self._is_known(chain.hashes[count - 1], beside):
            count -= 1
        return count * self._interval

    def _is_known(self, block_hash: BlockHash, beside: Container[BlockHash]) -> bool:
        if self._rows.lookup(block_hash) is not None:
            return True
        return self._parts > 0 and all(key in beside for key in part_keys(block_hash, self._parts))

    def not_in_pool(self, chains: Chains, matched: int, length: int) -> list[BlockHash]:
        missing = super().not_in_pool(chains, matched, length)
        if matched:
            checkpoint = chains[-1].hashes[matched // self._interval - 1]
            if self._rows.lookup(checkpoint) is None:
                missing += part_keys(checkpoint, self._parts)
        return missing


class HybridCacheManager(KVCacheManager):
    """Gives blocks and rows."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroup],
        states: StateGroup,
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
        tier: BlockTier | None = None,
        source: BlockSource | None = None,
        parts: int = 0,
    ) -> None:
        """`parts`: of a row, in the tier and the source."""
        super().__init__(
            num_blocks,
            groups,
            enable_prefix_caching=enable_prefix_caching,
            hasher=hasher,
            tier=tier,
            source=source,
        )
        if any(group.window or states.interval % group.block_size for group in groups):
            raise ValueError(f"checkpoints of {states} do not fit {list(groups)}")
        self.rows: BlockPool = BlockPool(states.num_rows)
        self._table = states.table
        self._interval = states.interval
        self._parts = parts
        if tier is not None:
            self.rows.evicted = []
        self._prefixes = CheckpointMatcher(self.groups, self.pool, self.rows, states.interval, parts)

    def chains(self, *, adapter: str = "", salt: str = "", attachments: Sequence[Attachment] = ()) -> Chains:
        chains = super().chains(adapter=adapter, salt=salt, attachments=attachments)
        size = self._interval
        of_rows = next((chain for chain in chains if chain.block_size == size), None)
        return (*chains, of_rows or self._new_chain(chains[0].root, size, adapter, attachments))

    @property
    def num_free(self) -> int:
        return super().num_free + self.rows.num_free

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self.rows.num_free == self.rows.num_blocks

    # -- a prompt comes in -----------------------------------------------------------------------------------

    def _admit_behind(
        self,
        matched: int,
        length: int,
        chains: Chains,
        chunk: int,
        reserve: int,
        fetched: Mapping[BlockHash, Any],
    ) -> tuple[BlockTables, int] | None:
        states = self._first_rows(matched, min(length, matched + chunk), chains[-1])
        if states is None:
            return None
        admitted = super()._admit_behind(matched, length, chains, chunk, reserve, fetched)
        if admitted is None:
            self.rows.release(states.held)
            return None
        admitted[0].loads += self._checkpoint_loads(states, matched // self._interval, fetched)
        self._use(admitted[0], states)
        return admitted

    def _first_rows(self, start: int, end: int, chain: HashChain) -> BlockTable | None:
        """A table with the checkpoint at `start`, and rows for the tokens up to `end`. One that was fetched gets a row,
        and is published like a computed one. None: rows are short."""
        states = BlockTable(self._table, len(self.groups), chain)
        count = start // self._interval
        states.first = max(0, count - 1)
        checkpoint = [self.rows.lookup(block_hash) for block_hash in chain.hashes[states.first : count]]
        kept = [row for row in checkpoint if row is not None]
        states.num_published = states.first + len(kept)
        self.rows.retain(kept)
        missing = -(-end // self._interval) - states.num_published
        if missing > self.rows.num_free:
            self.rows.release(kept)
            return None
        states.block_ids = [NO_BLOCK] * states.first + kept + self.rows.allocate(missing)
        if kept:
            self._note_use(chain.hashes[count - 1 : count])
        return states

    def _checkpoint_loads(
        self, states: BlockTable, count: int, fetched: Mapping[BlockHash, Any]
    ) -> list[tuple[int, Any]]:
        """The parts of the checkpoint behind `count` intervals, if it was fetched."""
        if states.num_published == count:
            return []
        parts = self._parts_of(states.block_ids[count - 1], states.chain.hashes[count - 1])
        return [(part, fetched[key]) for part, key in parts]

    def _part_ids(self, row: int) -> range:
        first = self.pool.num_blocks + row * self._parts
        return range(first, first + self._parts)

    def _note_use(self, block_hashes: Sequence[BlockHash]) -> None:
        if self.in_use is not None:
            for block_hash in block_hashes:
                self.in_use.update(dict.fromkeys(part_keys(block_hash, self._parts)))

    def _use(self, tables: BlockTables, states: BlockTable) -> None:
        tables.states = states
        tables.capacity = min(tables.capacity, len(states.block_ids) * self._interval)
        self._set_thresholds(tables)

    # -- what is behind the pool, or beside it ---------------------------------------------------------------

    def find(self, key: BlockHash) -> int | None:
        block_hash, part = key[:-_PART_BYTES], key[-_PART_BYTES:]
        if len(block_hash) != DIGEST_SIZE:
            return super().find(key)
        row = self.rows.lookup(block_hash)
        return None if row is None else self._part_ids(row)[int.from_bytes(part)]

    def cached_blocks(self) -> list[tuple[int, BlockHash]]:
        """Checkpoints come first: without one, blocks are of no use."""
        rows = self.rows.cached_blocks()
        parts = [pair for row, known in rows for pair in self._parts_of(row, known)]
        return parts + super().cached_blocks()

    def _parts_of(self, row: int, block_hash: BlockHash) -> Iterable[tuple[int, BlockHash]]:
        return zip(self._part_ids(row), part_keys(block_hash, self._parts), strict=True)

    def take_saves(self) -> list[BlockSave]:
        saves, evicted = super().take_saves(), self.rows.evicted
        if self.tier is not None and evicted:
            for row, block_hash in reversed(evicted):
                for part, key in self._parts_of(row, block_hash):
                    slot = self.tier.reserve(key)
                    if slot is not None:
                        saves.append(BlockSave(part, slot, key))
            evicted.clear()
        return saves

    def clear_cache(self) -> None:
        super().clear_cache()
        self.rows.clear_cache()
        if self.rows.evicted is not None:
            self.rows.evicted.clear()

    # -- tokens come in --------------------------------------------------------------------------------------

    def grow(self, tables: BlockTables, start: int, end: int) -> Growth | None:
        states = _states(tables)
        first = len(states.block_ids)
        missing = max(0, -(-end // self._interval) - first)
        growth = super().grow(tables, start, end) if missing <= self.rows.num_free else None
        if growth is None:
            return None
        if missing:
            states.block_ids += self.rows.allocate(missing)
            growth.updates.append((states.index, first, states.block_ids[first:]))
        tables.capacity = min(tables.capacity, len(states.block_ids) * self._interval)
        return growth

    def _set_thresholds(self, tables: BlockTables) -> None:
        """Intervals are whole blocks, so whenever there is a computed row to publish there is a block, too; a fetched
        one is published with the first step."""
        super()._set_thresholds(tables)
        if tables.states is not None:
            tables.next_trim = (tables.states.first + 2) * self._interval
            if self.enable_prefix_caching:
                tables.next_publish = min(tables.next_publish, (tables.states.num_published + 1) * self._interval)

    def publish(self, tables: BlockTables, token_ids: Sequence[int], num_computed: int) -> None:
        states, count = _states(tables), num_computed // self._interval
        if count > states.num_published:
            states.chain.extend(token_ids, count)
            first = max(states.num_published, states.first)
            for row, block_hash in zip(states.block_ids[first:count], states.chain.hashes[first:count], strict=True):
                self.rows.publish(row, block_hash)
            self._note_use(states.chain.hashes[first:count])
            states.num_published = count
        super().publish(tables, token_ids, num_computed)

    def keep(self, chains: Chains, num_tokens: int, retention: Retention, now: float) -> None:
        super().keep(chains[:-1], num_tokens, retention, now)
        self.rows.expire(now)
        self.rows.mark(chains[-1].hashes[: num_tokens // self._interval], retention, now)

    def trim(self, tables: BlockTables, num_computed: int) -> None:
        states = _states(tables)
        first = min(self._table.first_block(num_computed), len(states.block_ids))
        if first > states.first:
            self.rows.release(states.block_ids[states.first : first])
            states.block_ids[states.first : first] = [NO_BLOCK] * (first - states.first)
            states.first = first
        super().trim(tables, num_computed)

    # -- back to a checkpoint --------------------------------------------------------------------------------

    def checkpoint_before(self, num_tokens: int) -> int:
        return num_tokens // self._interval * self._interval

    def fork(self, parent: BlockTables, num_computed: int) -> tuple[BlockTables, Chains]:
        """`num_computed`: as `checkpoint_before` has it."""
        tables, chains = super().fork(parent, num_computed)
        states, count = _states(parent), num_computed // self._interval
        child = BlockTable(self._table, states.index, states.chain.branch(num_computed))
        child.first = max(0, count - 1)
        child.block_ids = [NO_BLOCK] * child.first + states.block_ids[child.first : count]
        child.num_published = min(states.num_published, count)
        self.rows.retain(child.held)
        self._use(tables, child)
        return tables, (*chains, child.chain)

    def rewind(self, tables: BlockTables, num_computed: int) -> int:
        """Blocks behind the checkpoint that the prefix cache knows are left to it: their tokens get others."""
        start = self.checkpoint_before(num_computed)
        for table in tables.tables:
            count = start // table.group.block_size
            if table.num_published > count:
                self.pool.release(table.block_ids[: count - 1 if count else None : -1])
                del table.block_ids[count:]
                table.num_published = count
                tables.capacity = min(tables.capacity, start)
        self._set_thresholds(tables)
        return start

    def free(self, tables: BlockTables) -> None:
        super().free(tables)
        states = _states(tables)
        self.rows.release(states.held)
        tables.states = None

    def check_integrity(self) -> None:
        super().check_integrity()
        self.rows.check_integrity()
        held = [row for tables in self.holders for row in _states(tables).held]
        require(NO_BLOCK not in held, "a row in use is missing")
        for row in range(self.rows.num_blocks):
            require(self.rows.ref_count(row) == held.count(row), f"row {row}: wrong reference count")
        for tables in self.holders:
            states = _states(tables)
            require(set(states.block_ids[: states.first]) <= {NO_BLOCK}, "a row behind the last checkpoint is held")
            require(tables.capacity <= len(states.block_ids) * self._interval, "capacity without rows")


def _states(tables: BlockTables) -> BlockTable:
    assert tables.states is not None
    return tables.states


def cache_manager(
    num_blocks: int,
    groups: Sequence[KVGroup],
    states: StateGroup | None,
    *,
    enable_prefix_caching: bool = True,
    hasher: BlockHasher | None = None,
    tier: BlockTier | None = None,
    source: BlockSource | None = None,
    parts: int = 0,
) -> KVCacheManager:
    """For models with and without recurrent layers; arguments as the managers have them."""
    if states is None:
        return KVCacheManager(
            num_blocks, groups, enable_prefix_caching=enable_prefix_caching, hasher=hasher, tier=tier, source=source
        )
    return HybridCacheManager(
        num_blocks,
        groups,
        states,
        enable_prefix_caching=enable_prefix_caching,
        hasher=hasher,
        tier=tier,
        source=source,
        parts=parts,
    )
