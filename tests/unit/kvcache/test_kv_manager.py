from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from penstock.kvcache import BlockHasher, BlockTable, IntegrityError, KVCacheManager


def admit(kv: KVCacheManager, tokens: list[int], **keys: object) -> tuple[BlockTable, int, tuple[int, int] | None]:
    admitted = kv.admit(tokens, **keys)  # type: ignore[arg-type]
    assert admitted is not None
    return admitted


def serve(kv: KVCacheManager, tokens: list[int], **keys: object) -> list[int]:
    """A request from its first to its last step: the blocks that it had."""
    table, _, _ = admit(kv, tokens, **keys)
    blocks = list(table.block_ids)
    kv.publish(table, tokens, len(tokens))
    kv.free(table)
    return blocks


def test_a_request_gets_room_for_all_of_its_tokens() -> None:
    kv = KVCacheManager(8, 4)
    table, num_cached, copy = admit(kv, list(range(9)))
    assert (len(table.block_ids), table.capacity, num_cached, copy) == (3, 12, 0, None)
    assert kv.usage == pytest.approx(3 / 8)


def test_a_known_prefix_is_shared() -> None:
    kv = KVCacheManager(8, 4)
    first = serve(kv, list(range(10)))
    table, num_cached, copy = admit(kv, [*range(8), 90, 91])
    assert num_cached == 8
    assert table.block_ids[:2] == first[:2]
    assert copy is None


def test_after_a_hit_on_everything_one_token_is_left_and_its_block_is_copied() -> None:
    kv = KVCacheManager(8, 4)
    first = serve(kv, list(range(8)))
    table, num_cached, copy = admit(kv, list(range(8)))
    assert num_cached == 7
    assert table.block_ids[0] == first[0]
    assert copy == (first[1], table.block_ids[1])
    assert table.block_ids[1] != first[1]
    assert kv.pool.is_writable(table.block_ids[1])
    assert len(table.hashes) == 1, "its second block is to be computed"


def test_a_hit_ends_at_the_first_block_that_differs() -> None:
    kv = KVCacheManager(16, 2)
    serve(kv, [1, 2, 3, 4, 5, 6])
    assert admit(kv, [1, 2, 9, 4, 5, 6])[1] == 2
    assert admit(kv, [9, 2, 3, 4, 5, 6])[1] == 0


def test_partly_filled_blocks_are_not_shared() -> None:
    kv = KVCacheManager(8, 4)
    serve(kv, [1, 2, 3])
    assert kv.pool.num_cached == 0
    assert admit(kv, [1, 2, 3, 4, 5])[1] == 0


def test_only_computed_blocks_are_shared() -> None:
    kv = KVCacheManager(8, 4)
    table, _, _ = admit(kv, list(range(8)))
    kv.publish(table, list(range(8)), 7)  # a chunk that ends one token before the second block is full
    assert kv.pool.num_cached == 1
    kv.publish(table, list(range(8)), 8)
    assert kv.pool.num_cached == 2


def test_a_table_says_when_its_next_block_is_full() -> None:
    kv = KVCacheManager(8, 4)
    table, _, _ = admit(kv, list(range(9)))
    assert table.next_publish == 4
    kv.publish(table, list(range(9)), 9)
    assert table.next_publish == 12
    assert admit(kv, list(range(9)))[0].next_publish == 12
    assert kv.fork(table, 6).next_publish == 8


@pytest.mark.parametrize("keys", [{"salt": "x"}, {"adapter": "x"}, {"read_cache": False}])
def test_what_is_not_for_sharing_is_not_found(keys: dict[str, object]) -> None:
    kv = KVCacheManager(8, 4)
    serve(kv, list(range(8)))
    assert admit(kv, list(range(8)), **keys)[1] == 0
    assert admit(kv, list(range(8)))[1] == 7


def test_without_a_prefix_cache_nothing_is_published_nor_found() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    table, num_cached, _ = admit(kv, list(range(8)))
    assert (num_cached, table.next_publish) == (0, sys.maxsize)


def test_a_prefix_is_evicted_from_its_tail() -> None:
    kv = KVCacheManager(4, 2)
    blocks = serve(kv, list(range(8)))
    assert kv.pool.allocate(2) == [blocks[3], blocks[2]]
    assert admit(kv, [0, 1, 2])[1] == 2, "the head is still there"


def test_reserved_blocks_stay_free() -> None:
    kv = KVCacheManager(4, 2)
    assert kv.admit([1, 2, 3], reserve=3) is None
    assert kv.pool.num_free == 4
    assert kv.admit([1, 2, 3], reserve=2) is not None
    assert kv.pool.num_free == 2


def test_a_hit_does_not_count_as_free_too() -> None:
    kv = KVCacheManager(4, 2)
    serve(kv, [1, 2, 3, 4])
    # two found and three missing: five of four
    assert kv.admit([1, 2, 3, 4, 5, 6, 7, 8, 9]) is None
    assert (kv.pool.num_free, kv.pool.num_cached) == (4, 2)
    kv.check_integrity()


def test_trying_again_hashes_nothing_again() -> None:
    hashed = 0

    class CountingHasher(BlockHasher):
        def block(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
            nonlocal hashed
            hashed += 1
            return super().block(parent, token_ids)

    kv = KVCacheManager(8, 2, hasher=CountingHasher())
    serve(kv, list(range(8)))
    tokens, known, hashed = [*range(8), 9, 9, 9], list[bytes](), 0
    assert kv.admit(tokens, reserve=5, known_hashes=known) is None
    assert hashed == 5, "four that are found and the first that is not"
    assert kv.admit(tokens, reserve=5, known_hashes=known) is None
    table, num_cached, _ = admit(kv, tokens, known_hashes=known)
    assert hashed == 5
    assert num_cached == 8
    assert table.hashes == known[:4]


def test_without_free_blocks_nothing_is_looked_up() -> None:
    kv = KVCacheManager(2, 2)
    admit(kv, [1, 2, 3])
    known: list[bytes] = []
    assert kv.admit([1, 2, 3], known_hashes=known) is None
    assert known == []


def test_growth_says_what_is_new() -> None:
    kv = KVCacheManager(4, 2)
    table, _, _ = admit(kv, [1, 2])
    growth = kv.grow(table, 2, 5)
    assert growth is not None
    assert (growth.start, growth.block_ids, growth.copy) == (1, table.block_ids[1:], None)
    assert (len(table.block_ids), table.capacity) == (3, 6)


def test_growth_without_blocks_changes_nothing() -> None:
    kv = KVCacheManager(2, 2)
    table, _, _ = admit(kv, [1, 2, 3])
    before = list(table.block_ids)
    assert kv.grow(table, 3, 5) is None
    assert (table.block_ids, table.capacity) == (before, 4)


def test_whoever_writes_first_after_a_fork_gets_a_copy() -> None:
    kv = KVCacheManager(8, 4)
    leader, _, _ = admit(kv, list(range(6)))
    shared = leader.block_ids[1]
    follower = kv.fork(leader, 5)
    assert follower.block_ids == leader.block_ids
    growth = kv.grow(follower, 5, 6)
    assert growth is not None
    assert growth.copy == (shared, follower.block_ids[1])
    assert follower.block_ids[1] != shared
    assert kv.pool.is_writable(shared), "the other one is alone with it now"
    assert leader.capacity <= 6, "it has to ask before it writes"
    again = kv.grow(leader, 6, 7)
    assert again is not None
    assert (again.copy, again.block_ids) == (None, [])
    kv.check_integrity()


def test_a_copy_needs_a_block_even_when_the_table_is_long_enough() -> None:
    kv = KVCacheManager(2, 2)
    table, _, _ = admit(kv, [1, 2, 3])
    kv.fork(table, 1)
    assert kv.grow(table, 1, 2) is None
    kv.check_integrity()


def test_the_leader_copies_when_it_writes_first() -> None:
    kv = KVCacheManager(8, 4)
    leader, _, _ = admit(kv, list(range(6)))
    follower = kv.fork(leader, 5)
    growth = kv.grow(leader, 6, 7)
    assert growth is not None
    assert growth.copy == (follower.block_ids[1], leader.block_ids[1])


def test_a_fork_within_the_first_token_has_no_blocks() -> None:
    kv = KVCacheManager(8, 4)
    leader, _, _ = admit(kv, [1])
    follower = kv.fork(leader, 0)
    assert follower.block_ids == []
    assert kv.grow(follower, 0, 1) is not None
    kv.check_integrity()


def test_full_blocks_of_a_fork_stay_shared() -> None:
    kv = KVCacheManager(8, 4)
    leader, _, _ = admit(kv, list(range(9)))
    follower = kv.fork(leader, 8)
    assert follower.block_ids == leader.block_ids[:2]
    growth = kv.grow(follower, 8, 9)
    assert growth is not None
    assert growth.copy is None
    assert [kv.pool.ref_count(block_id) for block_id in follower.block_ids] == [2, 2, 1]


def test_a_table_is_freed_once() -> None:
    kv = KVCacheManager(2, 2)
    table, _, _ = admit(kv, [1, 2])
    kv.free(table)
    with pytest.raises(KeyError):
        kv.free(table)


def test_a_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_size"):
        KVCacheManager(2, 0)


def test_a_wrong_reference_count_is_found() -> None:
    kv = KVCacheManager(4, 2, hasher=BlockHasher(b"k"))
    table, _, _ = admit(kv, [1, 2])
    kv.pool.retain(table.block_ids)
    with pytest.raises(IntegrityError, match="reference count"):
        kv.check_integrity()
