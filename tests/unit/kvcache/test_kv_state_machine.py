"""The KV cache manager against a model that remembers what has been written into every slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kvcache import (
    NO_BLOCK,
    BlockHasher,
    BlockSave,
    BlocksRemoved,
    BlockTables,
    BlockTier,
    CacheCleared,
    HashChain,
    KVCacheManager,
    KVGroup,
    Retention,
)
from penstock.kvcache.retention import Mark
from penstock.kvcache.table import blocks_of_request
from unit.kvcache.profiles import MACHINE_TIMEOUT, machine_settings

pytestmark = MACHINE_TIMEOUT

Slot = tuple[int, str, str, tuple[int, ...]]
"""Group, salt, adapter, and every token up to and with this position: what the keys and values there depend on."""
WINDOWS = st.sampled_from([0, 0, 1, 2, 3, 5])


@dataclass(eq=False)
class Sequence:
    """A live request, as a scheduler would keep it."""

    tables: BlockTables
    chains: tuple[HashChain, ...]
    tokens: list[int]
    num_computed: int
    salt: str
    adapter: str

    def slot(self, group: int, position: int) -> Slot:
        return group, self.salt, self.adapter, tuple(self.tokens[: position + 1])

    @property
    def held(self) -> list[int]:
        return [block for ids in self.tables.block_ids for block in ids if block != NO_BLOCK]


class KVMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.histories: list[list[int]] = [[0, 1, 0, 1, 0, 1, 0, 1]]
        self.now = 0.0
        self.promised: dict[bytes, float] = {}
        """Until when each block should be kept that a request has asked to keep."""

    @initialize(
        num_blocks=st.integers(1, 16),
        groups=st.lists(st.builds(KVGroup, st.integers(1, 4), WINDOWS), min_size=1, max_size=3),
        caching=st.sampled_from([True, True, False]),
        num_slots=st.sampled_from([0, 2, 8]),
    )
    def start(self, num_blocks: int, groups: list[KVGroup], caching: bool, num_slots: int) -> None:
        """`num_slots`: of the tier behind the pool; 0: there is none."""
        self.hasher = BlockHasher(b"k")
        self.groups = groups
        tier = BlockTier(num_slots, max_writing=3, max_reading=8) if num_slots else None
        if tier is not None:
            tier.open()
        self.kv = KVCacheManager(num_blocks, groups, enable_prefix_caching=caching, hasher=self.hasher, tier=tier)
        self.log = self.kv.keep_log()
        self.index: dict[tuple[int, bytes], tuple[tuple[int, bytes] | None, list[int]]] = {}
        """What a reader of the log knows: of each (group, hash) its parent and its tokens."""
        self._evict, self.kv.pool._evict = self.kv.pool._evict, self._checked_evict  # type: ignore[method-assign]
        self.contents: list[list[Slot | None]] = [[None] * 4 for _ in range(num_blocks)]
        self.store: list[list[Slot | None]] = [[None] * 4 for _ in range(num_slots)]
        self.writing: list[tuple[BlockSave, list[Slot | None]]] = []

    # -- rules -----------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        salt=st.sampled_from(["", "", "s"]),
        adapter=st.sampled_from(["", "", "s"]),
        reserve=st.integers(0, 2),
        chunk=st.integers(1, 8),
        read_cache=st.sampled_from([True, True, True, False]),
        rank=st.tuples(st.integers(0, 3)),
        most=st.sampled_from([1, 3, 99]),
    )
    def admit(
        self,
        data: st.DataObject,
        salt: str,
        adapter: str,
        reserve: int,
        chunk: int,
        read_cache: bool,
        rank: tuple[int],
        most: int,
    ) -> None:
        known = data.draw(st.sampled_from(self.histories))
        tokens = known[: data.draw(st.integers(0, len(known)))] + data.draw(st.lists(st.integers(0, 1), max_size=3))
        if not tokens:
            return
        before, chains = self._snapshot(), self.kv.chains(adapter=adapter, salt=salt)
        waited_for = self.kv.computing.find(tokens, chains[0], rank)
        assert self.kv.computing.find(tokens, chains[0], (0,)) is None, "nobody is ahead of that"
        fetched = {key: list(self.store[slot]) for key, slot in self.kv.missing(tokens, chains, most)}
        assert len(fetched) <= most
        for key in data.draw(st.sets(st.sampled_from(sorted(fetched)))) if fetched else ():
            del fetched[key]  # it could not be read
        admitted = self.kv.admit(tokens, chains, chunk, reserve=reserve, read_cache=read_cache, fetched=fetched)
        if admitted is None:
            assert self._snapshot() == before
            needed = blocks_of_request(self.groups, len(tokens), chunk)
            assert self.live or reserve or needed > self.kv.pool.num_blocks, "alone, and it would fit"
            return
        tables, num_cached = admitted
        assert self.kv.pool.num_free >= reserve
        assert num_cached < len(tokens)
        assert num_cached == 0 or (read_cache and self.kv.enable_prefix_caching)
        assert tables.capacity >= min(len(tokens), num_cached + chunk), "room for the next tokens was asked for"
        for group, ids in zip(self.groups, tables.block_ids, strict=True):
            assert group.window or len(ids) * group.block_size >= len(tokens), "room for all of its tokens"
        sequence = Sequence(tables, chains, tokens, num_cached, salt, adapter)
        self.live.append(sequence)
        self.kv.computing.announce(tables, tokens, rank)
        if waited_for is None and self.kv.enable_prefix_caching:
            size = self.groups[0].block_size
            full = len(tokens) // size
            uncached = [i for i in range(full) if self.kv.pool.lookup(chains[0].hashes[i]) is None]
            found = self.kv.computing.find(tokens, self.kv.chains(adapter=adapter, salt=salt)[0], (4,))
            blocks = self.kv.computing._by_hash
            assert found is None or found in [blocks.get(chains[0].hashes[i]) for i in uncached]

    @rule(
        data=st.data(),
        count=st.integers(1, 8),
        guesses=st.sampled_from([0, 0, 0, 3]),
        succeeds=st.sampled_from([True, True, True, True, False, None]),
    )
    def compute(self, data: st.DataObject, count: int, guesses: int, succeeds: bool | None) -> None:
        """A step of one request: a chunk of its prompt, or its newest token and guesses that prove wrong. It succeeds,
        fails for good, or is lost, to be run again (None)."""
        if not self.live:
            return
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(data.draw(st.integers(0, 1)))
        self._compute(sequence, count, guesses, succeeds)

    def _compute(self, sequence: Sequence, count: int, guesses: int = 0, succeeds: bool | None = True) -> None:
        start = sequence.num_computed
        end = min(start + count, len(sequence.tokens))
        top = end + guesses if end == len(sequence.tokens) else end
        if top > sequence.tables.capacity and not self._grow(sequence, start, top):
            return
        self._save()
        for block_id, loaded in sequence.tables.loads:
            self.contents[block_id] = list(loaded)
        if succeeds:
            self.kv.loaded(sequence.tables)
        if succeeds is not None:
            for source, destination in sequence.tables.copies:
                self.contents[destination] = list(self.contents[source])
            self.kv.copied(sequence.tables)
        for position in range(start, top):
            self._write(sequence, position, bool(succeeds) and position < end)
        if succeeds:
            sequence.num_computed = end
            if end >= sequence.tables.next_publish:
                self.kv.publish(sequence.tables, sequence.tokens, end)
            if end >= sequence.tables.next_trim:
                self.kv.trim(sequence.tables, end)
        elif succeeds is False:
            self._free(sequence)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """At the last token: what was computed before may have left a window."""
        ready = [s for s in self.live if s.num_computed and not s.tables.copies]
        if not ready:
            return
        parent = data.draw(st.sampled_from(ready))
        before = self.kv.pool.num_free
        tables, chains = self.kv.fork(parent.tables, parent.num_computed)
        assert self.kv.pool.num_free == before, "a fork takes no block"
        tokens = [*parent.tokens[: parent.num_computed], data.draw(st.integers(0, 1))]
        self.live.append(Sequence(tables, chains, tokens, parent.num_computed, parent.salt, parent.adapter))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            self._free(data.draw(st.sampled_from(self.live)))

    @rule(data=st.data(), seconds=st.sampled_from([2, 5]), tenant=st.sampled_from(["a", "b", "c"]))
    def keep(self, data: st.DataObject, seconds: int, tenant: str) -> None:
        if self.live:
            sequence = data.draw(st.sampled_from(self.live))
            self._keep(sequence, data.draw(st.integers(0, len(sequence.tokens))), Retention(seconds, tenant))

    @rule(data=st.data(), seconds=st.sampled_from([2, 5]), tenant=st.sampled_from(["a", "b", "c"]))
    def serve_and_keep(self, data: st.DataObject, seconds: int, tenant: str) -> None:
        """A whole request. Tenants share no prefixes: the salts see to it."""
        num_live = len(self.live)
        self.admit(data, tenant, "", 0, 8, True, (0,), 99)
        if len(self.live) == num_live:
            return
        sequence, num_computed = self.live[-1], -1
        while num_computed < sequence.num_computed < len(sequence.tokens):
            num_computed = sequence.num_computed
            self._compute(sequence, 8)
        self._free(sequence)
        self._keep(sequence, len(sequence.tokens), Retention(seconds, tenant))

    def _keep(self, sequence: Sequence, num_tokens: int, retention: Retention) -> None:
        """No tenant falls below an equal share because of this one, and this one gets its own."""
        tenant, until = retention.tenant, self.now + retention.seconds
        before, limit = self._marks_of_tenants(), self.kv.pool.num_blocks // 2
        hashes = [
            block_hash + bytes((g,)) * bool(g)
            for g, chain in enumerate(sequence.chains)
            for block_hash in chain.hashes[: num_tokens // chain.block_size]
        ]
        known = [block_hash for block_hash in hashes if self.kv.pool.lookup(block_hash) is not None]
        taken = {b for b, mark in self._marks().items() if mark.retention.tenant != tenant}
        shared = taken & {self._cached()[block_hash] for block_hash in known}
        self.kv.keep(sequence.chains, num_tokens, retention, self.now)
        for block_hash in known:
            self.promised[block_hash] = max(self.promised.get(block_hash, until), until)
        after = self._marks_of_tenants()
        share = limit // max(1, len(before.keys() | {tenant}))
        if not shared:  # else a mark may have changed its owner
            assert all(after[other] >= min(before[other], share) for other in before.keys() - {tenant})
            assert after[tenant] >= min(len(known), share)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.kv.pool.expire(self.now)
        assert all(mark.until > self.now for mark in self._marks().values())

    @rule(count=st.integers(1, 3), succeeds=st.sampled_from([True, True, True, False]))
    def write_saves(self, count: int, succeeds: bool) -> None:
        """The store has done the oldest writes, perhaps after the tier was cleared."""
        for save, contents in self.writing[:count]:
            self.store[save.slot] = contents if succeeds else [None] * 4
            if self.kv.tier is not None:
                self.kv.tier.written(save.block_hash, save.slot, succeeded=succeeds)
        del self.writing[:count]

    @rule()
    def clear_cache(self) -> None:
        self.kv.clear_cache()
        assert self.kv.pool.num_cached == self.kv.pool.num_marked == 0
        self.promised.clear()
        assert self.kv.tier is None or not self.kv.tier.num_kept
        self.writing.clear()

    # -- the model -------------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence, start: int, end: int) -> bool:
        tables, before, old = sequence.tables, self._snapshot(), sequence.tables.block_ids
        copies = [self._must_copy(sequence, group, start) for group in range(len(self.groups))]
        missing = [max(0, -(-end // group.block_size) - len(ids)) for group, ids in zip(self.groups, old, strict=True)]
        free, known = self.kv.pool.num_free, list(tables.copies)
        growth = self.kv.grow(tables, start, end)
        assert (growth is not None) == (sum(copies) + sum(missing) <= free)
        if growth is None:
            assert self._snapshot() == before
            assert tables.block_ids == old
            return False
        for group, entry, ids in growth.updates:
            old[group][entry:] = ids
        assert tables.block_ids == old, "the updates say all that has changed"
        assert tables.copies == known + growth.copies
        assert len(growth.copies) == sum(copies)
        assert tables.capacity >= end
        return True

    def _save(self) -> None:
        """What a step does first: what was evicted is still there."""
        self.writing += [(save, list(self.contents[save.block_id])) for save in self.kv.take_saves()]

    def _must_copy(self, sequence: Sequence, group: int, position: int) -> bool:
        ids, index = sequence.tables.block_ids[group], position // self.groups[group].block_size
        if index >= len(ids):
            return False
        others = [s for s in self.live if s is not sequence]
        shared = any(ids[index] in other.held or ids[index] in self._sources(other) for other in others)
        return shared or ids[index] in self._cached().values()

    def _sources(self, sequence: Sequence) -> list[int]:
        return [source for source, _ in sequence.tables.copies]

    def _write(self, sequence: Sequence, position: int, succeeds: bool) -> None:
        for index, (group, ids) in enumerate(zip(self.groups, sequence.tables.block_ids, strict=True)):
            block_id = ids[position // group.block_size]
            holders = [s for s in self.live if block_id in s.held or block_id in self._sources(s)]
            assert holders == [sequence], "a shared block must not be written"
            assert block_id not in self._cached().values(), "a cached block must not be written"
            slot = sequence.slot(index, position) if succeeds else None
            self.contents[block_id][position % group.block_size] = slot

    def _free(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.histories = [*self.histories[-9:], sequence.tokens]
        self.kv.free(sequence.tables)

    def _checked_evict(self) -> int:
        """A block that is kept goes only when there are no others."""
        pool = self.kv.pool
        free = {b for b in self._cached().values() if not pool.ref_count(b)}
        kept = free & self._marks().keys()
        block_id = self._evict()
        assert block_id in free
        assert block_id not in kept or kept == free
        return block_id

    def _marks(self) -> dict[int, Mark]:
        return self.kv.pool._marks.by_block

    def _marks_of_tenants(self) -> Counter[str]:
        return Counter(mark.retention.tenant for mark in self._marks().values())

    def _cached(self) -> dict[bytes, int]:
        return self.kv.pool._by_hash

    def _snapshot(self) -> tuple[object, ...]:
        pool = self.kv.pool
        refs = [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
        return refs, pool.num_free, dict(self._cached()), pool.num_evictions

    def _follow_log(self) -> None:
        for entry in self.log.take():
            if isinstance(entry, CacheCleared):
                self.index.clear()
            elif isinstance(entry, BlocksRemoved):
                for block_hash in entry.hashes:
                    del self.index[entry.group, block_hash]
            else:
                size, parent = entry.block_size, entry.parent
                assert len(entry.token_ids) == size * len(entry.hashes)
                for start, block_hash in zip(range(0, len(entry.token_ids), size), entry.hashes, strict=True):
                    assert (entry.group, block_hash) not in self.index, "it was there already"
                    known = None if parent is None else (entry.group, parent)
                    self.index[entry.group, block_hash] = known, list(entry.token_ids[start : start + size])
                    parent = block_hash

    # -- what must hold after every rule ---------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            held = {block_id for s in self.live for block_id in [*s.held, *self._sources(s)]}
            assert self.kv.pool.num_free == self.kv.pool.num_blocks - len(held)

    @invariant()
    def what_is_kept_was_promised(self) -> None:
        """And no more than half of all blocks is kept."""
        if hasattr(self, "kv"):
            assert self.kv.pool.num_marked <= self.kv.pool.num_blocks // 2
            by_block = {block_id: block_hash for block_hash, block_id in self._cached().items()}
            assert all(mark.until <= self.promised[by_block[b]] for b, mark in self._marks().items())

    @invariant()
    def every_request_finds_what_it_reads(self) -> None:
        """Of what it has computed: all, or in a group with a window, what the next token sees."""
        for sequence in self.live:
            contents = list(self.contents)
            for block_id, loaded in sequence.tables.loads:  # not made yet
                contents[block_id] = loaded
            for source, destination in sequence.tables.copies:  # not made yet
                contents[destination] = contents[source]
            for index, (group, ids) in enumerate(zip(self.groups, sequence.tables.block_ids, strict=True)):
                oldest = max(0, sequence.num_computed - group.window + 1) if group.window else 0
                for position in range(oldest, sequence.num_computed):
                    found = contents[ids[position // group.block_size]][position % group.block_size]
                    assert found == sequence.slot(index, position), f"position {position} holds {found}"

    @invariant()
    def a_window_holds_no_more_than_it_needs(self) -> None:
        for sequence in self.live:
            for group, ids in zip(self.groups, sequence.tables.block_ids, strict=True):
                if group.window and sequence.num_computed >= sequence.tables.next_trim:
                    raise AssertionError("it was not trimmed")
                assert all(block == NO_BLOCK for block in ids[: group.first_block(sequence.num_computed)])

    @invariant()
    def every_cached_block_holds_what_its_hash_says(self) -> None:
        if not hasattr(self, "kv"):
            return
        for block_hash, block_id in self._cached().items():
            self._check_contents(block_hash, self.contents[block_id])

    @invariant()
    def the_log_tells_what_is_cached(self) -> None:
        if not hasattr(self, "kv"):
            return
        self._follow_log()
        keys = {block_hash + (bytes((group,)) if group else b""): group for group, block_hash in self.index}
        assert keys.keys() == self._cached().keys()
        for key, group in keys.items():
            parent, tokens = self.index[group, key[:16]]
            slots = self.contents[self._cached()[key]][: self.groups[group].block_size]
            assert [slot[3][-1] for slot in slots if slot is not None] == tokens
            length = len(slots[0][3]) if slots[0] is not None else 0
            assert (parent is None) == (length == 1), "only a first block has no parent"

    @invariant()
    def the_tier_holds_what_its_hashes_say(self) -> None:
        if hasattr(self, "kv") and self.kv.tier is not None:
            for block_hash, slot in self.kv.tier._kept.items():
                self._check_contents(block_hash, self.store[slot])

    def _check_contents(self, block_hash: bytes, contents: list[Slot | None]) -> None:
        index = block_hash[-1] if len(block_hash) > 16 else 0
        size = self.groups[index].block_size
        last = contents[size - 1]
        assert last is not None, "a block that was never computed can be found"
        group, salt, adapter, tokens = last
        expected = self.hasher.root(adapter=adapter, salt=salt)
        for start in range(0, len(tokens), size):
            expected = self.hasher.block(expected, tokens[start : start + size])
        assert (group, block_hash[:16]) == (index, expected)

    def teardown(self) -> None:
        for sequence in self.live:
            self.kv.free(sequence.tables)
        if hasattr(self, "kv"):
            note(f"{self.kv.pool.num_evictions} evictions")
            assert self.kv.pool.num_free == self.kv.pool.num_blocks
            self.kv.computing.check_integrity(())
            assert not self.kv.holders


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = machine_settings(200, 30)
