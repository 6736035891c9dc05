from __future__ import annotations

import pytest

from penstock.kvcache import BlockPool, IntegrityError


def test_a_pool_gives_each_block_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3) + pool.allocate(2)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert [pool.ref_count(block_id) for block_id in blocks] == [1] * 5
    pool.check_integrity()


def test_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_an_empty_pool_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(num_blocks)


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    pool.retain([block_id])
    assert not pool.is_writable(block_id), "two holders"
    pool.release([block_id])
    assert pool.num_free == 0
    assert pool.is_writable(block_id)
    pool.release([block_id])
    assert pool.num_free == 1


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="once too often"):
        pool.release(blocks)
    assert pool.num_free == 2


def test_blank_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3)
    cached = pool.allocate(1)
    pool.publish(cached[0], b"h")
    pool.release(cached)
    others = pool.allocate(2)
    assert pool.lookup(b"h") == cached[0]
    assert pool.num_evictions == 0
    assert pool.allocate(1) == cached
    assert pool.lookup(b"h") is None
    assert pool.num_evictions == 1
    assert cached[0] not in others
    pool.check_integrity()


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block_id, block_hash in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish(block_id, block_hash)
    pool.release([a])
    pool.release([b])
    pool.release([c])
    pool.retain([a])  # used again, so c is older now
    pool.release([a])
    assert [pool.allocate(1)[0] for _ in range(3)] == [b, c, a]


def test_a_cached_block_is_immutable_even_for_its_only_holder() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    assert pool.is_writable(block_id)
    assert pool.publish(block_id, b"h")
    assert not pool.is_writable(block_id)


def test_the_first_of_two_equal_blocks_stays_in_the_cache() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"h")
    assert not pool.publish(second, b"h")
    assert pool.lookup(b"h") == first
    assert pool.num_cached == 1
    pool.release([second])
    assert pool.allocate(1) == [second], "it holds nothing that anybody could find: it is blank"
    pool.check_integrity()


def test_an_emptied_cache_finds_nothing_and_loses_nothing() -> None:
    pool = BlockPool(3)
    used, free = pool.allocate(2)
    pool.publish(used, b"used")
    pool.publish(free, b"free")
    pool.release([free])
    pool.clear_cache()
    assert pool.num_cached == 0
    assert pool.lookup(b"used") is None
    assert pool.lookup(b"free") is None
    assert (pool.num_free, pool.ref_count(used)) == (2, 1)
    pool.check_integrity()
    pool.allocate(2)
    assert pool.num_evictions == 0, "nothing is left that could be evicted"


def _two_holders_one_count(pool: BlockPool) -> None:
    pool._ref_counts[pool.allocate(1)[0]] = 0


def _free_twice(pool: BlockPool) -> None:
    pool._blank.append(pool._blank[0])


def _stale_index(pool: BlockPool) -> None:
    pool._by_hash[b"h"] = 0


def _hash_on_a_blank_block(pool: BlockPool) -> None:
    pool._hashes[pool._blank[0]] = b"h"


@pytest.mark.parametrize("damage", [_two_holders_one_count, _free_twice, _stale_index, _hash_on_a_blank_block])
def test_damage_is_found(damage: object) -> None:
    pool = BlockPool(4)
    assert callable(damage)
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()
