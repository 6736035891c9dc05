"""The KV cache manager for models with recurrent layers: rows of states beside the blocks of attention.

The prefix cache knows a checkpoint by the hash of the tokens up to there. Outside of the engine its row is as many
blocks as its bytes take, its parts: each has a key and an id of its own, the ids behind those of the pool's blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from penstock.kvcache.hashing import DIGEST_SIZE, Attachment, BlockHasher, Chains
from penstock.kvcache.integrity import require
from penstock.kvcache.manager import KVCacheManager
from penstock.kvcache.pool import BlockHash, BlockPool
from penstock.kvcache.prefixes import NO_HASHES, PrefixMatcher
from penstock.kvcache.retention import Retention
from penstock.kvcache.states import StateGroup, StateRows
from penstock.kvcache.table import BlockTables, Growth, KVGroup, StateTable
from penstock.kvcache.tier import BlockSave, BlockSource, BlockTier

_PART_BYTES = 3


def part_keys(block_hash: BlockHash, parts: int) -> list[BlockHash]:
    """What the parts of a row are known by. No block of a group has such a key (`group_key`): they are longer."""
    return [block_hash + part.to_bytes(_PART_BYTES) for part in range(parts)]


class CheckpointMatcher(PrefixMatcher):
    """A prefix ends at a checkpoint. One token at least is left to compute: the state behind the last one would be of
    no use for its logits."""

    def __init__(self, groups: Sequence[KVGroup], pool: BlockPool, rows: StateRows, parts: int = 0) -> None:
        """`parts` of a row; 0: rows are nowhere else."""
        super().__init__(groups, pool)
        self._rows = rows.pool
        self._block_size = rows.block_size
        self._parts = parts

    def match(
        self, token_ids: Sequence[int], chains: Chains, limit: int, beside: Container[BlockHash] = NO_HASHES
    ) -> int:
        length = super().match(token_ids, chains, min(limit, len(token_ids) - 1), beside)
        chain, count = chains[-1], length // self._block_size
        chain.extend(token_ids, count)
        while count and not self._is_known(chain.hashes[count - 1], beside):
            count -= 1
        return count * self._block_size

    def _is_known(self, block_hash: BlockHash, beside: Container[BlockHash]) -> bool:
        if self._rows.lookup(block_hash) is not None:
            return True
        if not self._parts or part_keys(block_hash, 1)[0] not in beside:
            return False
        return all(key in beside for key in part_keys(block_hash, self._parts))

    def not_in_pool(self, chains: Chains, matched: int, length: int) -> list[BlockHash]:
        missing = super().not_in_pool(chains, matched, length)
        if matched:
            checkpoint = chains[-1].hashes[matched // self._block_size - 1]
            if self._rows.lookup(checkpoint) is None:
                missing += part_keys(checkpoint, self._parts)
        return missing


class HybridCacheManager(KVCacheManager):
    """Gives blocks and rows."""

    rows: BlockPool

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
        if any(group.window or states.block_size % group.block_size for group in groups):
            raise ValueError(f"checkpoints of {states} do not fit {list(groups)}")
        self._states = StateRows(states, only_regular=not enable_prefix_caching)
        self.rows = self._states.pool
        self._block_size = states.block_size
        self._parts = parts
        if tier is not None:
            self.rows.evicted = []
        self.prefixes = CheckpointMatcher(self.groups, self.pool, self._states, parts)

    def chains(self, *, adapter: str = "", salt: str = "", attachments: Sequence[Attachment] = ()) -> Chains:
        chains = super().chains(adapter=adapter, salt=salt, attachments=attachments)
        size = self._block_size
        of_rows = next((chain for chain in chains if chain.block_size == size), None)
        return (*chains, of_rows or self.new_chain(chains[0].root, size, adapter, attachments))

    @property
    def num_free(self) -> int:
        return super().num_free + self.rows.num_free

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self.rows.num_free == self.rows.num_blocks

    # -- a prompt comes in -----------------------------------------------------------------------------------

    def admit_behind(
        self,
        matched: int,
        length: int,
        chains: Chains,
        chunk: int,
        reserve: int,
        fetched: Mapping[BlockHash, Any],
    ) -> tuple[BlockTables, int] | None:
        states = StateTable(len(self.groups), chains[-1], -(-length // self._block_size))
        states.prompt_end = self._states.prompt_end(length, matched // self._block_size)
        if not self._states.admit(states, matched, min(length, matched + chunk)):
            return None
        admitted = super().admit_behind(matched, length, chains, chunk, reserve, fetched)
        if admitted is None:
            self._states.release(states)
            return None
        tables, _ = admitted
        if matched and states.num_published:
            self._note_use([chains[-1].hashes[states.start - 1]])
        elif matched:
            parts = self._parts_of(states.rows[0], chains[-1].hashes[states.start - 1])
            tables.loads += [(part, fetched[key]) for part, key in parts]
        tables.step_end = states.prompt_end * self._block_size
        self._use(tables, states)
        return admitted

    def _part_ids(self, row: int) -> range:
        first = self.pool.num_blocks + row * self._parts
        return range(first, first + self._parts)

    def _note_use(self, block_hashes: Sequence[BlockHash]) -> None:
        if self.in_use is not None:
            for block_hash in block_hashes:
                self.in_use.update(dict.fromkeys(part_keys(block_hash, self._parts)))

    def _use(self, tables: BlockTables, states: StateTable) -> None:
        tables.states = states
        self._bound(tables)

    def _bound(self, tables: BlockTables) -> None:
        """Makes the manager be asked when rows need it, too, not only for the sake of blocks."""
        states = _states_of(tables)
        tables.capacity = min(tables.capacity, states.length * self._block_size)
        tables.next_trim = self._states.next_trim(states)
        if self.enable_prefix_caching:
            tables.next_publish = min(tables.next_publish, self._states.next_publish(states))

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
        states = _states_of(tables)
        before = states.length
        growth = super().grow(tables, start, end) if self._states.have_room(states, end) else None
        if growth is None:
            return None
        rows = self._states.grow(states, end)
        if rows:
            growth.updates.append((states.index, before, rows))
        self._bound(tables)
        return growth

    def publish(self, tables: BlockTables, token_ids: Sequence[int], num_computed: int) -> None:
        states = _states_of(tables)
        self._note_use(self._states.publish(states, token_ids, num_computed // self._block_size))
        super().publish(tables, token_ids, num_computed)
        self._bound(tables)

    def keep(self, chains: Chains, num_tokens: int, retention: Retention, now: float) -> None:
        super().keep(chains[:-1], num_tokens, retention, now)
        self.rows.expire(now)
        self.rows.mark(chains[-1].hashes[: num_tokens // self._block_size], retention, now)

    def trim(self, tables: BlockTables, num_computed: int) -> None:
        self._states.trim(_states_of(tables), num_computed // self._block_size)
        super().trim(tables, num_computed)
        self._bound(tables)

    # -- back to a checkpoint --------------------------------------------------------------------------------

    def checkpoint_before(self, tables: BlockTables, num_computed: int) -> int:
        block = num_computed // self._block_size
        return self._states.checkpoint_before(_states_of(tables), block) * self._block_size

    def kept_of(self, num_tokens: int) -> int:
        return self._states.regular_before(num_tokens // self._block_size) * self._block_size

    def fork(self, parent: BlockTables, num_computed: int) -> tuple[BlockTables, Chains]:
        """`num_computed`: as `checkpoint_before` has it."""
        tables, chains = super().fork(parent, num_computed)
        states = _states_of(parent)
        of_blocks = (chain for chain in chains if chain.block_size == self._block_size)
        chain = next(of_blocks, None) or states.chain.branch(num_computed)
        self._use(tables, self._states.fork(states, num_computed // self._block_size, chain))
        return tables, (*chains, chain)

    def rewind(self, tables: BlockTables, num_computed: int) -> int:
        start = super().rewind(tables, self.checkpoint_before(tables, num_computed))
        self._bound(tables)
        return start

    def free(self, tables: BlockTables) -> None:
        states = _states_of(tables)
        super().free(tables)
        self._note_use(self._states.release(states))
        tables.states = None

    def check_integrity(self) -> None:
        super().check_integrity()
        self._states.check_integrity([_states_of(tables) for tables in self.holders])
        for tables in self.holders:
            length = _states_of(tables).length
            require(tables.capacity <= length * self._block_size, "capacity without rows")


def _states_of(tables: BlockTables) -> StateTable:
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
