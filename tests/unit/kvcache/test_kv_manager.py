from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from penstock.kvcache import (
    NO_BLOCK,
    BlockHasher,
    BlockTables,
    IntegrityError,
    KVCacheManager,
    KVGroup,
    largest_chunk,
)
from penstock.kvcache.hashing import group_key
from penstock.kvcache.table import blocks_of_request

ALL = 1000
"""A chunk that is never the limit."""
FIRST, LATER = (0,), (1,)
"""Ranks."""


def manager(num_blocks: int, block_size: int, **options: object) -> KVCacheManager:
    return KVCacheManager(num_blocks, [KVGroup(block_size)], **options)  # type: ignore[arg-type]


def try_to_admit(
    kv: KVCacheManager, tokens: list[int], *, chunk: int = ALL, salt: str = "", adapter: str = "", **options: object
) -> tuple[BlockTables, int] | None:
    return kv.admit(tokens, kv.chains(salt=salt, adapter=adapter), chunk, **options)  # type: ignore[arg-type]


def admit(kv: KVCacheManager, tokens: list[int], **options: object) -> tuple[BlockTables, int]:
    admitted = try_to_admit(kv, tokens, **options)  # type: ignore[arg-type]
    assert admitted is not None
    return admitted


def blocks(tables: BlockTables) -> list[int]:
    """Of the first group."""
    return tables.block_ids[0]


def serve(kv: KVCacheManager, tokens: list[int], **options: object) -> list[int]:
    """A request from its first to its last step: the blocks that it had in the first group."""
    tables, num_cached = admit(kv, tokens, **options)
    given = blocks(tables)
    for end in range(num_cached + 1, len(tokens) + 1):
        assert end <= tables.capacity or kv.grow(tables, end - 1, end) is not None
        kv.copied(tables)
        given = [old if old != NO_BLOCK else new for old, new in zip(given, blocks(tables), strict=False)]
        kv.publish(tables, tokens, end)
        kv.trim(tables, end)
    kv.free(tables)
    return given


def test_a_request_gets_room_for_all_of_its_tokens() -> None:
    kv = manager(8, 4)
    table, num_cached = admit(kv, list(range(9)))
    assert (len(blocks(table)), table.capacity, num_cached, table.copies) == (3, 12, 0, [])
    assert kv.pool.num_free == 8 - 3


def test_a_known_prefix_is_shared() -> None:
    kv = manager(8, 4)
    first = serve(kv, list(range(10)))
    table, num_cached = admit(kv, [*range(8), 90, 91])
    assert num_cached == 8
    assert blocks(table)[:2] == first[:2]
    assert not table.copies


def test_after_a_hit_on_everything_one_token_is_left_and_its_block_is_copied() -> None:
    kv = manager(8, 4)
    first = serve(kv, list(range(8)))
    table, num_cached = admit(kv, list(range(8)))
    assert num_cached == 7
    assert blocks(table)[0] == first[0]
    assert table.copies == [(first[1], blocks(table)[1])]
    assert blocks(table)[1] != first[1]
    assert kv.pool.is_writable(blocks(table)[1])
    assert table.next_publish == 8, "its second block is to be computed"
    assert kv.pool.ref_count(first[1]) == 1, "no other request may have it before the copy is made"
    kv.copied(table)
    assert (table.copies, kv.pool.ref_count(first[1])) == ([], 0)
    kv.check_integrity()


def test_a_hit_ends_at_the_first_block_that_differs() -> None:
    kv = manager(16, 2)
    serve(kv, [1, 2, 3, 4, 5, 6])
    assert admit(kv, [1, 2, 9, 4, 5, 6])[1] == 2
    assert admit(kv, [9, 2, 3, 4, 5, 6])[1] == 0


def test_partly_filled_blocks_are_not_shared() -> None:
    kv = manager(8, 4)
    serve(kv, [1, 2, 3])
    assert kv.pool.num_cached == 0
    assert admit(kv, [1, 2, 3, 4, 5])[1] == 0


def test_only_computed_blocks_are_shared() -> None:
    kv = manager(8, 4)
    table, _ = admit(kv, list(range(8)))
    kv.publish(table, list(range(8)), 7)  # a chunk that ends one token before the second block is full
    assert kv.pool.num_cached == 1
    kv.publish(table, list(range(8)), 8)
    assert kv.pool.num_cached == 2


def test_a_table_says_when_its_next_block_is_full() -> None:
    kv = manager(8, 4)
    table, _ = admit(kv, list(range(9)))
    assert table.next_publish == 4
    kv.publish(table, list(range(9)), 9)
    assert table.next_publish == 12
    assert admit(kv, list(range(9)))[0].next_publish == 12
    assert kv.fork(table, 6)[0].next_publish == 8


@pytest.mark.parametrize("keys", [{"salt": "x"}, {"adapter": "x"}, {"read_cache": False}])
def test_what_is_not_for_sharing_is_not_found(keys: dict[str, object]) -> None:
    kv = manager(8, 4)
    serve(kv, list(range(8)))
    assert admit(kv, list(range(8)), **keys)[1] == 0
    assert admit(kv, list(range(8)))[1] == 7


def test_without_a_prefix_cache_nothing_is_published_nor_found() -> None:
    kv = manager(8, 4, enable_prefix_caching=False)
    table, num_cached = admit(kv, list(range(8)))
    assert (num_cached, table.next_publish) == (0, sys.maxsize)


def test_a_prefix_is_evicted_from_its_tail() -> None:
    kv = manager(4, 2)
    blocks = serve(kv, list(range(8)))
    assert kv.pool.allocate(2) == [blocks[3], blocks[2]]
    assert admit(kv, [0, 1, 2])[1] == 2, "the head is still there"


def test_reserved_blocks_stay_free() -> None:
    kv = manager(4, 2)
    assert try_to_admit(kv, [1, 2, 3], reserve=3) is None
    assert kv.pool.num_free == 4
    assert try_to_admit(kv, [1, 2, 3], reserve=2) is not None
    assert kv.pool.num_free == 2


def test_a_hit_does_not_count_as_free_too() -> None:
    kv = manager(4, 2)
    serve(kv, [1, 2, 3, 4])
    # two found and three missing: five of four
    assert try_to_admit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9]) is None
    assert (kv.pool.num_free, kv.pool.num_cached) == (4, 2)
    kv.check_integrity()


def test_trying_again_hashes_nothing_again() -> None:
    hashed = 0

    class CountingHasher(BlockHasher):
        def block(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
            nonlocal hashed
            hashed += 1
            return super().block(parent, token_ids)

    kv = manager(8, 2, hasher=CountingHasher())
    serve(kv, list(range(8)))
    tokens, hashed = [*range(8), 9, 9, 9], 0
    chains = kv.chains()
    assert kv.admit(tokens, chains, ALL, reserve=5) is None
    assert hashed == 5, "four that are found and the first that is not"
    assert kv.admit(tokens, chains, ALL, reserve=5) is None
    assert kv.computing.find(tokens, chains[0], LATER) is None
    admitted = kv.admit(tokens, chains, ALL)
    assert admitted is not None
    assert (admitted[1], hashed) == (8, 5)


def test_without_free_blocks_nothing_is_looked_up() -> None:
    kv = manager(2, 2)
    admit(kv, [1, 2, 3])
    chains = kv.chains()
    assert kv.admit([1, 2, 3], chains, ALL) is None
    assert chains[0].hashes == []


def test_growth_says_what_is_new() -> None:
    kv = manager(4, 2)
    table, _ = admit(kv, [1, 2])
    growth = kv.grow(table, 2, 5)
    assert growth is not None
    assert growth == ([(0, 1, blocks(table)[1:])], [])
    assert (len(blocks(table)), table.capacity) == (3, 6)


def test_growth_without_blocks_changes_nothing() -> None:
    kv = manager(2, 2)
    table, _ = admit(kv, [1, 2, 3])
    before = list(blocks(table))
    assert kv.grow(table, 3, 5) is None
    assert (blocks(table), table.capacity) == (before, 4)


def test_the_first_writer_after_a_fork_gets_a_copy() -> None:
    kv = manager(8, 4)
    leader, _ = admit(kv, list(range(6)))
    shared = blocks(leader)[1]
    follower, _ = kv.fork(leader, 5)
    assert blocks(follower) == blocks(leader)
    growth = kv.grow(follower, 5, 6)
    assert growth is not None
    assert growth.copies == follower.copies == [(shared, blocks(follower)[1])]
    assert growth.updates == [(0, 1, [blocks(follower)[1]])]
    assert blocks(follower)[1] != shared
    assert not kv.pool.is_writable(shared), "not before the copy is made"
    kv.copied(follower)
    assert kv.pool.is_writable(shared), "the other one is alone with it now"
    assert leader.capacity <= 6, "it has to ask before it writes"
    again = kv.grow(leader, 6, 7)
    assert again is not None
    assert again == ([], [])
    kv.check_integrity()


def test_a_copy_needs_a_block_even_when_the_table_is_long_enough() -> None:
    kv = manager(2, 2)
    table, _ = admit(kv, [1, 2, 3])
    kv.fork(table, 1)
    assert kv.grow(table, 1, 2) is None
    kv.check_integrity()


def test_the_leader_copies_when_it_writes_first() -> None:
    kv = manager(8, 4)
    leader, _ = admit(kv, list(range(6)))
    follower, _ = kv.fork(leader, 5)
    growth = kv.grow(leader, 6, 7)
    assert growth is not None
    assert growth.copies == [(blocks(follower)[1], blocks(leader)[1])]


def test_a_fork_within_the_first_token_has_no_blocks() -> None:
    kv = manager(8, 4)
    leader, _ = admit(kv, [1])
    follower, _ = kv.fork(leader, 0)
    assert blocks(follower) == []
    assert kv.grow(follower, 0, 1) is not None
    kv.check_integrity()


def test_full_blocks_of_a_fork_stay_shared() -> None:
    kv = manager(8, 4)
    leader, _ = admit(kv, list(range(9)))
    follower, _ = kv.fork(leader, 8)
    assert blocks(follower) == blocks(leader)[:2]
    growth = kv.grow(follower, 8, 9)
    assert growth is not None
    assert growth.copies == []
    assert [kv.pool.ref_count(block_id) for block_id in blocks(follower)] == [2, 2, 1]


def test_a_table_is_freed_once() -> None:
    kv = manager(2, 2)
    table, _ = admit(kv, [1, 2])
    kv.free(table)
    with pytest.raises(KeyError):
        kv.free(table)


def test_what_a_request_gives_up_before_its_copy_is_made_comes_back_whole() -> None:
    kv = manager(4, 2)
    serve(kv, [1, 2])
    table, _ = admit(kv, [1, 2])
    assert kv.pool.num_free == 2
    kv.free(table)
    assert kv.pool.num_free == 4
    kv.check_integrity()


def test_without_room_for_a_copy_the_last_block_is_computed_again() -> None:
    kv = manager(2, 2)
    serve(kv, [1, 2, 3, 4])
    table, num_cached = admit(kv, [1, 2, 3, 4])
    assert (num_cached, table.copies) == (2, [])
    kv.check_integrity()


@pytest.mark.parametrize(("size", "window"), [(0, 0), (-1, 0), (4, -1)])
def test_groups_that_make_no_sense_are_refused(size: int, window: int) -> None:
    with pytest.raises(ValueError, match="no such group"):
        KVGroup(size, window)
    with pytest.raises(ValueError, match="at least one group"):
        KVCacheManager(4, [])


def test_a_wrong_reference_count_is_found() -> None:
    kv = manager(4, 2, hasher=BlockHasher(b"k"))
    table, _ = admit(kv, [1, 2])
    kv.pool.retain(blocks(table))
    with pytest.raises(IntegrityError, match="reference count"):
        kv.check_integrity()


# -- groups and windows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_the_first_block_is_that_of_the_oldest_token_in_the_window(size: int, window: int) -> None:
    group = KVGroup(size, window)
    for position in range(30):
        seen = range(max(0, position - window + 1), position + 1)
        assert group.first_block(position) == seen[0] // size


def test_groups_have_tables_of_their_own_from_one_pool() -> None:
    kv = KVCacheManager(8, [KVGroup(2), KVGroup(4)])
    table, _ = admit(kv, list(range(6)))
    first, second = table.block_ids
    assert (len(first), len(second), table.capacity) == (3, 2, 6)
    assert len({*first, *second}) == 5
    assert table.next_publish == 2
    kv.check_integrity()


def test_equal_tokens_of_different_groups_are_different_contents() -> None:
    kv = KVCacheManager(8, [KVGroup(2), KVGroup(2)])
    table, _ = admit(kv, [1, 2, 3])
    kv.publish(table, [1, 2, 3], 3)
    assert kv.pool.num_cached == 2
    found, num_cached = admit(kv, [1, 2, 3])
    assert num_cached == 2
    assert [ids[0] for ids in found.block_ids] == [ids[0] for ids in table.block_ids]


def test_a_hit_ends_where_every_group_has_a_full_block() -> None:
    kv = KVCacheManager(40, [KVGroup(2), KVGroup(3)])
    serve(kv, list(range(11)))
    assert admit(kv, [*range(11), 12])[1] == 6
    table, num_cached = admit(kv, list(range(6)))
    assert num_cached == 5
    assert len(table.copies) == 2, "of the last block of each group"


def test_blocks_behind_the_window_go_back() -> None:
    kv = KVCacheManager(16, [KVGroup(2, 4)])
    tokens = list(range(20))
    table, _ = admit(kv, tokens, chunk=4)
    most = 0
    for end in range(4, 21, 4):
        assert kv.grow(table, end - 4, end) is not None
        most = max(most, 16 - kv.pool.num_free)
        kv.publish(table, tokens, end)
        if end >= table.next_trim:
            kv.trim(table, end)
        kv.check_integrity()
    assert most <= 5
    assert blocks(table)[:8] == [NO_BLOCK] * 8, "position 20 reads 17 to 20"
    assert kv.pool.num_free == 16 - 2


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
def test_blocks_go_back_with_the_first_token_that_does_not_read_them(window: int) -> None:
    group = KVGroup(2, window)
    kv = KVCacheManager(16, [group])
    table, _ = admit(kv, list(range(20)), chunk=1)
    for end in range(1, 21):
        assert end <= table.capacity or kv.grow(table, end - 1, end) is not None
        first = group.first_block(end)
        assert (end >= table.next_trim) == any(block != NO_BLOCK for block in blocks(table)[:first])
        kv.trim(table, end)


def test_what_went_back_can_still_be_found() -> None:
    kv = KVCacheManager(16, [KVGroup(2, 4), KVGroup(4)])
    tokens = list(range(20))
    serve(kv, tokens)
    table, num_cached = admit(kv, tokens[:9])
    assert num_cached == 8
    assert [ids[:2].count(NO_BLOCK) for ids in table.block_ids] == [2, 0], "position 8 reads 5 to 8"


def test_of_a_window_only_what_is_read_must_be_there() -> None:
    kv = KVCacheManager(20, [KVGroup(2, 4)])
    serve(kv, list(range(12)))
    kv.pool.allocate(20 - 6 + 3)  # evicts the blocks that went back first: those of positions 0 to 5
    table, num_cached = admit(kv, list(range(13)), chunk=1)
    assert num_cached == 12
    kv.free(table)
    assert admit(kv, list(range(6)), chunk=1)[1] == 0


def evict(kv: KVCacheManager, tokens: list[int], *lost: tuple[int, int]) -> None:
    """Takes these (group, block of the tokens) out of the cache, and no others."""
    before = kv.pool.num_cached
    for g, chain in enumerate(kv.chains()):
        chain.extend(tokens, len(tokens) // chain.block_size)
        for index, block_hash in enumerate(chain.hashes):
            block_id = kv.pool.lookup(group_key(block_hash, g))
            if (g, index) not in lost and block_id is not None:
                kv.pool.retain([block_id])  # used again, so the others are older
                kv.pool.release([block_id])
    kv.pool.release(kv.pool.allocate(kv.pool.num_free - before + len(lost)))
    assert kv.pool.num_cached == before - len(lost)


def test_a_hit_on_everything_needs_the_window_of_its_last_token() -> None:
    kv, tokens = KVCacheManager(8, [KVGroup(2, 3)]), list(range(8))
    serve(kv, tokens)
    evict(kv, tokens, (0, 2))  # position 7 reads 5 to 7
    assert admit(kv, tokens)[1] == 4
    kv.check_integrity()


def test_what_one_window_leaves_of_a_hit_the_others_must_have_too() -> None:
    """Behind 12 tokens the second group lacks a block; behind 10, where it has all, the first does."""
    kv, tokens = KVCacheManager(24, [KVGroup(2, 4), KVGroup(2, 4)]), list(range(13))
    serve(kv, tokens)
    evict(kv, tokens, (0, 3), (1, 5))
    assert admit(kv, tokens)[1] == 6
    kv.check_integrity()


@pytest.mark.parametrize("matched", [0, 6, 10])
def test_a_request_alone_is_admitted_wherever_it_fits(matched: int) -> None:
    """What is matched counts among the blocks that a window needs at once."""
    groups = [KVGroup(2, 6)]
    for num_blocks in range(1, 12):
        kv = KVCacheManager(num_blocks, groups)
        if blocks_of_request(groups, 20, 2) <= num_blocks:
            if matched:
                serve(kv, list(range(matched)), chunk=2)
            assert try_to_admit(kv, list(range(20)), chunk=2) is not None, num_blocks
    assert blocks_of_request(groups, 20, 2) == 5


def test_a_window_saves_memory() -> None:
    """Five of six groups with a window of 512: what an 8k prompt needs, against full attention everywhere."""
    windows = KVCacheManager(4000, [KVGroup(16), *[KVGroup(16, 512)] * 5])
    full = KVCacheManager(4000, [KVGroup(16)] * 6)
    for kv in (windows, full):
        table, _ = admit(kv, list(range(8192)), chunk=256)
        for start in range(0, 8192, 256):
            assert start + 256 <= table.capacity or kv.grow(table, start, start + 256) is not None
            kv.publish(table, list(range(8192)), start + 256)
            if start + 256 >= table.next_trim:
                kv.trim(table, start + 256)
    assert 4000 - windows.pool.num_free <= 0.35 * (4000 - full.pool.num_free)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_step_takes_no_more_of_a_prompt_than_leaves_what_a_window_saves(steps_in_flight: int) -> None:
    groups = [KVGroup(16), *[KVGroup(16, 512)] * 5]
    chunk = largest_chunk(groups, 2048, steps_in_flight)
    most = blocks_of_request(groups, 8192, steps_in_flight * chunk)
    assert most <= 0.35 * blocks_of_request([KVGroup(16)] * 6, 8192, 2048)


@pytest.mark.parametrize(
    ("windows", "max_tokens", "steps_in_flight", "expected"),
    [
        ((0,), 8192, 1, 8192),
        ((0, 128), 8192, 1, 512),
        ((0, 128), 256, 1, 256),
        ((0, 512, 1024), 8192, 1, 2048),
        ((0, 1024), 8192, 2, 1024),
        ((4096,), 2048, 1, 2048),
    ],
)
def test_how_much_of_a_prompt_a_step_takes(
    windows: tuple[int, ...], max_tokens: int, steps_in_flight: int, expected: int
) -> None:
    groups = [KVGroup(16, window) for window in windows]
    assert largest_chunk(groups, max_tokens, steps_in_flight) == expected


# -- the same prompt twice -------------------------------------------------------------------------------------


def test_others_can_see_what_is_being_computed() -> None:
    kv = manager(16, 2)
    tokens = list(range(7))
    table, _ = admit(kv, tokens)
    assert kv.computing.find(tokens, kv.chains()[0], LATER) is None
    kv.computing.announce(table, tokens, FIRST)
    last = kv.computing.find(tokens, kv.chains()[0], LATER)
    first = kv.computing.find([0, 1, 9, 9], kv.chains()[0], LATER)
    assert last is not None
    assert first is not None
    assert kv.computing.find([9, 1], kv.chains()[0], LATER) is None
    assert kv.computing.find(tokens, kv.chains(salt="s")[0], LATER) is None
    kv.publish(table, tokens, 3)
    assert not first.is_pending
    assert last.is_pending
    assert kv.computing.find(tokens, kv.chains()[0], LATER) == last, "right behind what is cached"
    kv.publish(table, tokens, 7)
    assert not last.is_pending
    assert kv.computing.find(tokens, kv.chains()[0], LATER) is None


def test_who_gives_up_computes_nothing() -> None:
    kv = manager(16, 2)
    table, _ = admit(kv, list(range(6)))
    kv.computing.announce(table, list(range(6)), FIRST)
    last = kv.computing.find(list(range(6)), kv.chains()[0], LATER)
    assert last is not None
    kv.free(table)
    assert not last.is_pending
    kv.check_integrity()


def test_nobody_waits_for_who_is_behind() -> None:
    kv = manager(16, 2)
    tokens = list(range(6))
    behind, _ = admit(kv, tokens)
    kv.computing.announce(behind, tokens, LATER)
    assert kv.computing.find(tokens, kv.chains()[0], FIRST) is None
    ahead, _ = admit(kv, tokens)
    kv.computing.announce(ahead, tokens, FIRST)
    last = kv.computing.find(tokens, kv.chains()[0], LATER)
    assert last is not None
    kv.free(behind)
    assert kv.computing.find(tokens, kv.chains()[0], LATER) == last
    kv.publish(ahead, tokens, 6)
    assert kv.computing.find(tokens, kv.chains()[0], LATER) is None


def test_what_anybody_has_published_nobody_waits_for() -> None:
    kv = manager(16, 2)
    tokens = list(range(6))
    tables = [admit(kv, tokens)[0] for _ in range(2)]
    kv.computing.announce(tables[0], tokens, FIRST)
    kv.computing.announce(tables[1], tokens, LATER)
    kv.publish(tables[1], tokens, 6)
    assert kv.computing.find(tokens, kv.chains()[0], (2,)) is None
    kv.publish(tables[0], tokens, 6)
    for table in tables:
        kv.free(table)
    kv.check_integrity()


def test_nobody_waits_for_what_is_cached() -> None:
    kv = manager(16, 2)
    serve(kv, [1, 2, 3, 4])
    table, _ = admit(kv, [1, 2, 3, 4])  # computes the last token again, on a copy
    kv.computing.announce(table, [1, 2, 3, 4], FIRST)
    assert kv.computing.find([1, 2, 3, 4], kv.chains()[0], LATER) is None
