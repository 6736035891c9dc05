"""The KV cache book-keeping against a model that remembers what has been written into every slot."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kvcache import BlockHasher, BlockTable, KVCacheManager
from unit.kvcache.profiles import MACHINE_TIMEOUT, machine_settings

pytestmark = MACHINE_TIMEOUT

Slot = tuple[str, str, tuple[int, ...]]
"""Salt, adapter, and every token up to and with this position: what the keys and values there depend on."""


@dataclass(eq=False)
class Sequence:
    """A live request, as a scheduler would keep it."""

    table: BlockTable
    tokens: list[int]
    num_computed: int
    salt: str
    adapter: str

    def slot(self, position: int) -> Slot:
        return self.salt, self.adapter, tuple(self.tokens[: position + 1])


class KVMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.histories: list[list[int]] = [[0, 1, 0, 1, 0, 1, 0, 1]]

    @initialize(
        num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), caching=st.sampled_from([True, True, False])
    )
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.hasher = BlockHasher(b"k")
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching, hasher=self.hasher)
        self.contents: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks)]

    # -- rules -----------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        salt=st.sampled_from(["", "", "s"]),
        adapter=st.sampled_from(["", "", "s"]),
        reserve=st.integers(0, 2),
        read_cache=st.sampled_from([True, True, True, False]),
    )
    def admit(self, data: st.DataObject, salt: str, adapter: str, reserve: int, read_cache: bool) -> None:
        known = data.draw(st.sampled_from(self.histories))
        tokens = known[: data.draw(st.integers(0, len(known)))] + data.draw(st.lists(st.integers(0, 1), max_size=3))
        if not tokens:
            return
        before = self._snapshot()
        admitted = self.kv.admit(tokens, adapter=adapter, salt=salt, reserve=reserve, read_cache=read_cache)
        if admitted is None:
            assert self._snapshot() == before
            # one more than its own blocks at most: after a hit on everything, the copy of the last block
            assert self.kv.blocks_for(len(tokens)) + 1 + reserve > self.kv.pool.num_free
            return
        table, num_cached, copy = admitted
        assert self.kv.pool.num_free >= reserve
        assert num_cached < len(tokens)
        assert num_cached == 0 or (read_cache and self.kv.enable_prefix_caching)
        assert table.capacity >= len(tokens), "room for all of its tokens was asked for"
        self._copy(copy)
        self.live.append(Sequence(table, tokens, num_cached, salt, adapter))

    @rule(data=st.data(), count=st.integers(1, 8), succeeds=st.sampled_from([True, True, True, True, False]))
    def compute(self, data: st.DataObject, count: int, succeeds: bool) -> None:
        """A step of one request: a chunk of its prompt, or its newest token."""
        if not self.live:
            return
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(data.draw(st.integers(0, 1)))
        start = sequence.num_computed
        end = min(start + count, len(sequence.tokens))
        if end > sequence.table.capacity and not self._grow(sequence, start, end):
            return
        for position in range(start, end):
            self._write(sequence, position, sequence.slot(position) if succeeds else None)
        if not succeeds:
            self._free(sequence)
            return
        sequence.num_computed = end
        self.kv.publish(sequence.table, sequence.tokens, end)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if not self.live:
            return
        parent = data.draw(st.sampled_from(self.live))
        num_computed = data.draw(st.integers(0, parent.num_computed))
        before = self.kv.pool.num_free
        table = self.kv.fork(parent.table, num_computed)
        assert self.kv.pool.num_free == before, "a fork takes no block"
        tokens = parent.tokens[: num_computed + 1]
        self.live.append(Sequence(table, tokens, num_computed, parent.salt, parent.adapter))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            self._free(data.draw(st.sampled_from(self.live)))

    @rule()
    def clear_cache(self) -> None:
        self.kv.pool.clear_cache()
        assert self.kv.pool.num_cached == 0

    # -- the model -------------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence, start: int, end: int) -> bool:
        table, before = sequence.table, self._snapshot()
        blocks = list(table.block_ids)
        needed = max(0, self.kv.blocks_for(end) - len(blocks)) + self._must_copy(sequence, start)
        free = self.kv.pool.num_free
        growth = self.kv.grow(table, start, end)
        assert (growth is not None) == (needed <= free)
        if growth is None:
            assert self._snapshot() == before
            assert table.block_ids == blocks
            return False
        assert table.block_ids == blocks[: growth.start] + growth.block_ids
        self._copy(growth.copy)
        return True

    def _must_copy(self, sequence: Sequence, position: int) -> bool:
        index = position // self.kv.block_size
        if index >= len(sequence.table.block_ids):
            return False
        block_id = sequence.table.block_ids[index]
        shared = any(block_id in other.table.block_ids for other in self.live if other is not sequence)
        return shared or block_id in self._cached().values()

    def _copy(self, copy: tuple[int, int] | None) -> None:
        if copy is not None:
            source, destination = copy
            self.contents[destination] = list(self.contents[source])

    def _write(self, sequence: Sequence, position: int, slot: Slot | None) -> None:
        block_id = sequence.table.block_ids[position // self.kv.block_size]
        holders = [other for other in self.live if block_id in other.table.block_ids]
        assert holders == [sequence], "a shared block must not be written"
        assert block_id not in self._cached().values(), "a cached block must not be written"
        self.contents[block_id][position % self.kv.block_size] = slot

    def _free(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.histories.append(sequence.tokens)
        self.kv.free(sequence.table)

    def _cached(self) -> dict[bytes, int]:
        return self.kv.pool._by_hash

    def _snapshot(self) -> tuple[object, ...]:
        pool = self.kv.pool
        refs = [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
        return refs, pool.num_free, dict(self._cached()), pool.num_evictions

    # -- what must hold after every rule ---------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            held = {block_id for sequence in self.live for block_id in sequence.table.block_ids}
            assert self.kv.pool.num_free == self.kv.pool.num_blocks - len(held)

    @invariant()
    def every_request_finds_what_it_computed(self) -> None:
        for sequence in self.live:
            size = self.kv.block_size
            for position in range(sequence.num_computed):
                found = self.contents[sequence.table.block_ids[position // size]][position % size]
                assert found == sequence.slot(position), f"position {position} holds {found}"

    @invariant()
    def every_cached_block_holds_what_its_hash_says(self) -> None:
        if not hasattr(self, "kv"):
            return
        size = self.kv.block_size
        for block_hash, block_id in self._cached().items():
            last = self.contents[block_id][-1]
            assert last is not None, "a block that was never computed is in the cache"
            salt, adapter, tokens = last
            expected = self.hasher.root(adapter=adapter, salt=salt)
            for start in range(0, len(tokens), size):
                expected = self.hasher.block(expected, tokens[start : start + size])
            assert block_hash == expected

    def teardown(self) -> None:
        for sequence in self.live:
            self.kv.free(sequence.table)
        if hasattr(self, "kv"):
            note(f"{self.kv.pool.num_evictions} evictions")
            assert self.kv.pool.num_free == self.kv.pool.num_blocks


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = machine_settings(400, 40)
