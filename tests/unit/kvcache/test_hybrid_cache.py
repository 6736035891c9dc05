"""Rows of recurrent states: checkpoints, and how a sequence goes back to one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.kvcache import BlockTables, BlockTier, HybridCacheManager, KVGroup, Retention, StateGroup

TOKENS = list(range(40))


def manager(interval: int = 4, num_rows: int = 20, num_blocks: int = 40, **options: bool) -> HybridCacheManager:
    """With checkpoints at multiples of the interval only: it is one block of rows."""
    return HybridCacheManager(num_blocks, [KVGroup(2)], StateGroup(interval, num_rows, interval), **options)


def admit(kv: HybridCacheManager, tokens: Sequence[int], chunk: int = 40) -> tuple[BlockTables, int]:
    admitted = kv.admit(tokens, kv.chains(), chunk)
    assert admitted is not None
    return admitted


def compute(kv: HybridCacheManager, tables: BlockTables, tokens: Sequence[int], end: int, start: int = 0) -> None:
    """A step that succeeds."""
    if end > tables.capacity:
        assert kv.grow(tables, start, end) is not None
    if end >= tables.next_publish:
        kv.publish(tables, tokens, end)
    if end >= tables.next_trim:
        kv.trim(tables, end)
    kv.check_integrity()


def rows(tables: BlockTables) -> list[int]:
    assert tables.states is not None
    return tables.states.rows


def test_a_hit_ends_at_the_last_checkpoint() -> None:
    kv = manager()
    tables, cached = admit(kv, TOKENS[:11])
    assert (cached, len(rows(tables))) == (0, 3)
    compute(kv, tables, TOKENS, 11)
    kv.free(tables)
    assert kv.is_idle
    for length, hit in ((11, 8), (9, 8), (8, 4), (5, 4), (4, 0)):
        tables, cached = admit(kv, TOKENS[:length])
        assert cached == hit, length
        kv.free(tables)
    kv.check_integrity()


def test_a_checkpoint_that_was_evicted_shortens_the_hit() -> None:
    kv = manager(num_rows=4)
    tables, _ = admit(kv, TOKENS[:9], chunk=9)
    compute(kv, tables, TOKENS, 9)
    kv.free(tables)
    other, _ = admit(kv, [99] * 12, chunk=12)  # takes the blank rows and the oldest checkpoint
    kv.free(other)
    assert admit(kv, TOKENS[:9])[1] == 8
    kv.rows.clear_cache()
    assert admit(kv, [*TOKENS[:8], 5], chunk=4)[1] == 0


def test_a_request_keeps_its_last_checkpoint_and_the_row_in_use() -> None:
    kv = manager()
    tables, _ = admit(kv, TOKENS[:3])
    for end in range(3, 40):
        compute(kv, tables, TOKENS, end, end - 1)
        assert len(rows(tables)) == (end - 1) // 4 + 1 - max(0, end // 4 - 1)
        assert len(rows(tables)) <= 2


def test_lost_steps_go_back_to_a_checkpoint() -> None:
    kv = manager(interval=8)
    tables, _ = admit(kv, TOKENS[:13])
    compute(kv, tables, TOKENS, 13)
    checkpoint, shared = rows(tables)[0], list(tables.tables[0].block_ids)
    assert kv.rewind(tables, 13) == 8
    assert rows(tables)[0] == checkpoint
    assert kv.rows.ref_count(checkpoint) == 1
    kv.check_integrity()
    assert tables.capacity == 8
    assert kv.grow(tables, 8, 13) is not None
    again = tables.tables[0].block_ids
    assert again[:4] == shared[:4]
    assert all(kv.pool.is_writable(block) for block in again[4:]), "what the prefix cache knows is not written"
    compute(kv, tables, TOKENS, 14, 8)
    kv.free(tables)
    assert kv.is_idle


@pytest.mark.parametrize(("computed", "start"), [(13, 12), (12, 12), (3, 0)])
def test_a_fork_shares_what_lies_before_a_checkpoint(computed: int, start: int) -> None:
    kv = manager()
    tables, _ = admit(kv, TOKENS[:computed])
    compute(kv, tables, TOKENS, computed)
    assert kv.checkpoint_before(tables, computed) == start
    child, chains = kv.fork(tables, start)
    kv.check_integrity()
    assert len(chains) == len(kv.chains())
    assert child.block_ids[0] == tables.block_ids[0][: start // 2]
    assert rows(child) == rows(tables)[: bool(start)]
    compute(kv, child, [*TOKENS[:computed], 77], computed + 1, start)
    assert not set(rows(child)[bool(start) :]) & set(rows(tables)), "each writes rows of its own"
    kv.free(tables)
    kv.free(child)
    assert kv.is_idle


def test_short_rows_are_like_short_blocks() -> None:
    kv = manager(num_rows=3)
    tables, _ = admit(kv, TOKENS[:8], chunk=8)
    free = kv.num_free
    assert kv.admit([7] * 8, kv.chains(), 8) is None
    assert kv.num_free == free
    assert kv.grow(tables, 8, 17) is None
    assert kv.num_free == free
    assert kv.grow(tables, 8, 12) is not None
    kv.check_integrity()


def test_without_a_prefix_cache_no_checkpoint_is_found() -> None:
    kv = manager(enable_prefix_caching=False)
    tables, _ = admit(kv, TOKENS[:9])
    compute(kv, tables, TOKENS, 9)
    kv.free(tables)
    assert admit(kv, TOKENS[:9])[1] == 0


def test_checkpoints_are_kept_as_long_as_their_blocks() -> None:
    kv = manager(num_rows=6)
    tables, _ = admit(kv, TOKENS[:9])
    compute(kv, tables, TOKENS, 9)
    chains = kv.chains()
    kv.free(tables)
    assert kv.prefixes.match(TOKENS, chains, 9) == 8
    kv.keep(chains, 9, Retention(10, "a"), 0.0)
    other, _ = admit(kv, [99] * 15, chunk=15)
    kv.free(other)
    assert admit(kv, TOKENS[:9])[1] == 8


def test_the_cache_can_be_emptied() -> None:
    kv = manager()
    tables, _ = admit(kv, TOKENS[:9])
    compute(kv, tables, TOKENS, 9)
    kv.clear_cache()
    kv.check_integrity()
    kv.free(tables)
    assert kv.rows.num_cached == 0
    assert admit(kv, TOKENS[:9])[1] == 0


def test_chunks_are_bounded_by_the_rows_of_steps_in_flight() -> None:
    states = StateGroup(4, 10, 2)
    assert states.largest_chunk(100, 1) == 28
    assert states.largest_chunk(100, 2) == 12
    assert states.largest_chunk(5, 2) == 5
    with pytest.raises(ValueError, match="too few"):
        StateGroup(4, 5, 2).largest_chunk(100, 2)


@pytest.mark.parametrize("groups", [[KVGroup(3)], [KVGroup(2, 4)]])
def test_checkpoints_fit_whole_blocks_without_windows(groups: list[KVGroup]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        HybridCacheManager(8, groups, StateGroup(4, 8, 2))


def test_sizes_of_nothing() -> None:
    with pytest.raises(ValueError, match="no such group"):
        StateGroup(0, 8, 2)


def test_a_checkpoint_goes_out_and_comes_back_in_parts() -> None:
    """Its parts have ids behind those of the blocks. Without one of them it is of no use."""
    tier = BlockTier(40, max_writing=20, max_reading=20)
    tier.open()
    kv = HybridCacheManager(6, [KVGroup(2)], StateGroup(4, 3, 4), tier=tier, parts=3)
    tables, _ = admit(kv, TOKENS[:9], chunk=9)
    compute(kv, tables, TOKENS, 9)
    [row] = [row for row in rows(tables) if kv.rows.is_cached(row)]
    kv.free(tables)
    cached = kv.cached_blocks()
    assert {6 + 3 * row, 7 + 3 * row, 8 + 3 * row} < {block_id for block_id, _ in cached}
    assert all(kv.find(key) == block_id for block_id, key in cached)
    other, _ = admit(kv, [99] * 12, chunk=12)
    saves = kv.take_saves()
    assert {6 + 3 * row, 7 + 3 * row, 8 + 3 * row} < {save.block_id for save in saves}
    for save in saves:
        tier.written(save.block_hash, save.slot, succeeded=True)
    kv.free(other)
    chains = kv.chains()
    missing = kv.missing(TOKENS[:9], chains, 20)
    assert len(missing) == 4 + 3
    fetched = dict(missing)
    admitted = kv.admit(TOKENS[:9], chains, 9, fetched=fetched)
    assert admitted is not None
    tables, cached_tokens = admitted
    assert cached_tokens == 8
    [checkpoint, _] = rows(tables)
    assert [block_id for block_id, _ in tables.loads[-3:]] == [6 + 3 * checkpoint + part for part in range(3)]
    assert [contents for _, contents in tables.loads] == [slot for _, slot in missing]
    kv.loaded(tables)
    compute(kv, tables, TOKENS, 9, 8)
    assert kv.rows.is_cached(checkpoint), "it is published with the first step"
    kv.free(tables)
    kv.clear_cache()
    tier.open(missing[:-1])
    assert kv.missing(TOKENS[:9], kv.chains(), 20) == []


def sparse_manager(num_rows: int = 20) -> HybridCacheManager:
    """A checkpoint every 64 tokens, so one beside these saves at least 8."""
    return HybridCacheManager(400, [KVGroup(2)], StateGroup(64, num_rows, 2))


def answer(kv: HybridCacheManager, prompt: Sequence[int], num_tokens: int = 0) -> int:
    """A request that generates so many tokens, alone. Returns how much of its prompt was cached."""
    tables, cached = admit(kv, prompt, chunk=64)
    for end in range(cached + 1, len(prompt) + num_tokens + 1):
        compute(kv, tables, [*prompt, *range(1000, 1000 + num_tokens)], end, end - 1)
    assert len(rows(tables)) <= 2
    kv.free(tables)
    kv.check_integrity()
    return cached


def test_the_next_turn_goes_on_near_the_end_of_the_prompt() -> None:
    """The prompt's last tokens come back otherwise, as those in which a template begins an answer."""
    kv = sparse_manager()
    assert answer(kv, TOKENS) == 0
    assert answer(kv, [*TOKENS[:36], *range(500, 520)]) == 32
    assert answer(kv, [*TOKENS[:20], *range(600, 620)]) == 0, "no checkpoint is before that"


def test_the_next_turn_goes_on_behind_the_answer() -> None:
    kv = sparse_manager()
    assert answer(kv, TOKENS, 21) == 0
    assert answer(kv, [*TOKENS, *range(1000, 1021), *range(500, 520)]) == 60


def test_a_checkpoint_that_would_save_little_is_not_made() -> None:
    kv = sparse_manager()
    answer(kv, TOKENS[:15])
    answer(kv, TOKENS[:5], 3)
    assert kv.rows.num_cached == 0


def test_prompts_that_begin_alike_share_the_regular_checkpoints() -> None:
    kv = sparse_manager()
    alike = range(70)
    answer(kv, [*alike, *range(300, 340)])
    assert answer(kv, [*alike, *range(400, 440)]) == 64


def test_of_a_chat_the_checkpoints_of_earlier_turns_are_evicted_first() -> None:
    kv = sparse_manager(num_rows=15)
    chat, cached = list(range(100)), []
    answer(kv, [*range(700, 800)])
    for turn in range(6):
        cached.append(answer(kv, chat, 5))
        chat += range(2000 + 30 * turn, 2030 + 30 * turn)
    assert cached == [0, 92, 128, 152, 182, 212]
    assert answer(kv, [*range(700, 780)]) == 64, "another prompt's is still there"


def test_where_rows_are_short_there_are_the_regular_checkpoints_only() -> None:
    kv = sparse_manager(num_rows=4)
    other, _ = admit(kv, [99] * 2)
    assert answer(kv, TOKENS, 30) == 0
    assert admit(kv, [*TOKENS, *range(1000, 1030)])[1] == 64
    kv.free(other)


def test_samples_go_on_near_the_end_of_their_prompt() -> None:
    kv = sparse_manager()
    tables, _ = admit(kv, TOKENS)
    compute(kv, tables, TOKENS, 32)
    assert kv.checkpoint_before(tables, 39) == 32
    kv.publish(tables, TOKENS, 40)
    child, _ = kv.fork(tables, 32)
    kv.check_integrity()
    assert rows(child) == rows(tables)[:1]
    compute(kv, child, TOKENS, 40, 32)
    kv.free(tables)
    kv.free(child)
    assert kv.is_idle
