from __future__ import annotations

from penstock.kvcache import BlockPool, Retention


class Cache:
    """A pool in which cached blocks have names, and are evictable unless told otherwise."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

    def fill(self, names: str) -> list[int]:
        """The last name is evicted last."""
        blocks = self.pool.allocate(len(names))
        for block_id, name in zip(blocks, names, strict=True):
            self.pool.publish(block_id, name.encode())
        self.pool.release(blocks)
        return blocks

    def keep(self, names: str, seconds: int = 10, tenant: str = "", now: float = 0.0) -> None:
        """A prompt's blocks, its beginning first."""
        self.pool.mark([name.encode() for name in names], Retention(seconds, tenant), now)
        self.pool.check_integrity()

    def evicted(self) -> str:
        """All evictable blocks, in the order in which they would go."""
        cached = [block_hash.decode() for _, block_hash in self.pool.cached_blocks()]
        self.pool.check_integrity()
        return "".join(reversed(cached))


def test_marked_blocks_go_last_and_a_prompts_end_before_its_beginning() -> None:
    cache = Cache(6)
    cache.fill("abcdef")
    cache.keep("abx")
    assert cache.evicted() == "cdefba"
    cache.pool.allocate(5)
    assert cache.evicted() == "a"
    cache.pool.allocate(1)
    assert cache.pool.num_marked == 0


def test_a_block_in_use_keeps_its_mark() -> None:
    cache = Cache(4)
    blocks = cache.fill("abcd")
    cache.pool.retain(blocks[:2])
    cache.keep("a")
    cache.pool.release(blocks[:2])
    assert cache.evicted() == "cdba"
    cache.pool.retain(blocks[:1])
    cache.pool.expire(10)
    cache.pool.release(blocks[:1])
    assert cache.evicted() == "cdba"
    cache.fill("e")
    assert cache.evicted() == "dbae", "it has no mark any more"


def test_expired_blocks_are_the_next_to_go() -> None:
    cache = Cache(6)
    cache.fill("abcdef")
    cache.keep("ef", seconds=10)
    cache.keep("a", seconds=20)
    cache.pool.expire(9.9)
    assert cache.evicted() == "bcdfea"
    cache.pool.expire(10)
    assert cache.evicted() == "febcda"


def test_a_longer_time_stays() -> None:
    cache = Cache(4)
    cache.fill("abcd")
    cache.keep("a", seconds=20)
    cache.keep("a", seconds=5, now=1)
    cache.pool.expire(19)
    assert cache.pool.num_marked == 1
    cache.keep("a", seconds=5, now=19)
    cache.pool.expire(23)
    assert cache.pool.num_marked == 1
    cache.pool.expire(24)
    assert cache.pool.num_marked == 0


def test_a_tenants_newer_marks_take_the_place_of_its_older_ones() -> None:
    cache = Cache(6)
    cache.fill("abcdef")
    cache.keep("ab")
    cache.keep("cd", now=1)
    assert cache.evicted() == "efbadc", "b is like others again, used last of them"
    cache.keep("a", now=2)
    cache.keep("e", now=3)
    assert cache.evicted()[-3:] == "cae", "d was marked longest ago"


def test_no_tenant_falls_below_an_equal_share() -> None:
    cache = Cache(12)
    cache.fill("abcdefghijkl")
    cache.keep("abcdef", tenant="first")
    cache.keep("gh", tenant="second")
    cache.keep("ijkl", tenant="third")
    cache.keep("ghk", tenant="second")
    marks = cache.pool._marks
    counts = {tenant: len(blocks) for tenant, blocks in marks._by_tenant.items()}
    assert counts == {"first": 2, "second": 2, "third": 2}
    assert cache.evicted()[-6:-4] == "ba", "of the first prompt the beginning is left"


def test_one_block_is_too_few_to_keep_any() -> None:
    cache = Cache(1)
    cache.fill("a")
    cache.keep("a")
    assert cache.pool.num_marked == 0
