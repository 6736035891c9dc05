"""Recurrent states in the KV cache: rows of tables, with checkpoints, beside the blocks of attention.

A recurrent layer keeps a state of fixed size in place of keys and values of every token, and it cannot be computed
again in place: the token behind it has changed it. So a request has one more table, of rows. Its entry k is the row
with the state behind the tokens of the k-th interval, as far as they are computed. A row whose interval is full is a
checkpoint: it is never written again, and the prefix cache knows it by the hash of the tokens up to there. The token
that begins the next interval reads it and writes a row of its own.

A request keeps its last checkpoint beside the row in use. What has to go back (a prefix hit, a fork, steps that are
lost) goes back to a checkpoint, and computes the tokens behind it again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.kvcache.hashing import Attachment, BlockHasher, Chains, HashChain
from penstock.kvcache.integrity import require
from penstock.kvcache.manager import KVCacheManager
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.prefixes import NO_HASHES, PrefixMatcher
from penstock.kvcache.retention import Retention
from penstock.kvcache.table import NO_BLOCK, BlockTable, BlockTables, Growth, KVGroup

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


class CheckpointMatcher(PrefixMatcher):
    """A prefix ends at a checkpoint. One token at least is left to compute: the state behind the last one would be of
    no use for its logits."""

    def __init__(self, groups: Sequence[KVGroup], pool: BlockPool, rows: BlockPool, interval: int) -> None:
        super().__init__(groups, pool)
        self._rows = rows
        self._interval = interval

    def match(
        self, token_ids: Sequence[int], chains: Chains, limit: int, beside: Container[BlockHash] = NO_HASHES
    ) -> int:
        length = super().match(token_ids, chains, min(limit, len(token_ids) - 1), beside)
        chain, count = chains[-1], length // self._interval
        chain.extend(token_ids, count)
        while count and self._rows.lookup(chain.hashes[count - 1]) is None:
            count -= 1
        return count * self._interval


class HybridCacheManager(KVCacheManager):
    """Gives blocks and rows. There is nothing behind its pools: offloading and handing over know blocks only."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroup],
        states: StateGroup,
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
    ) -> None:
        super().__init__(num_blocks, groups, enable_prefix_caching=enable_prefix_caching, hasher=hasher)
        if any(group.window or states.interval % group.block_size for group in groups):
            raise ValueError(f"checkpoints of {states} do not fit {list(groups)}")
        self.rows: BlockPool = BlockPool(states.num_rows)
        self._table = states.table
        self._interval = states.interval
        self._prefixes = CheckpointMatcher(self.groups, self.pool, self.rows, states.interval)

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
        self._use(admitted[0], states)
        return admitted

    def _first_rows(self, start: int, end: int, chain: HashChain) -> BlockTable | None:
        """A table with the checkpoint at `start`, and rows for the tokens up to `end`. None: rows are short."""
        states = BlockTable(self._table, len(self.groups), chain)
        count = states.num_published = start // self._interval
        states.first = max(0, count - 1)
        checkpoint = [self.rows.lookup(block_hash) for block_hash in chain.hashes[states.first : count]]
        kept = [row for row in checkpoint if row is not None]
        self.rows.retain(kept)
        missing = -(-end // self._interval) - count
        if missing > self.rows.num_free:
            self.rows.release(kept)
            return None
        states.block_ids = [NO_BLOCK] * states.first + kept + self.rows.allocate(missing)
        return states

    def _use(self, tables: BlockTables, states: BlockTable) -> None:
        tables.states = states
        tables.capacity = min(tables.capacity, len(states.block_ids) * self._interval)
        self._set_thresholds(tables)

    def clear_cache(self) -> None:
        super().clear_cache()
        self.rows.clear_cache()

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
        """Intervals are whole blocks, so whenever there is a row to publish there is a block, too."""
        super()._set_thresholds(tables)
        if tables.states is not None:
            tables.next_trim = (tables.states.first + 2) * self._interval

    def publish(self, tables: BlockTables, token_ids: Sequence[int], num_computed: int) -> None:
        states, count = _states(tables), num_computed // self._interval
        if count > states.num_published:
            states.chain.extend(token_ids, count)
            first = max(states.num_published, states.first)
            for row, block_hash in zip(states.block_ids[first:count], states.chain.hashes[first:count], strict=True):
                self.rows.publish(row, block_hash)
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
