"""Block operations: what the pool and the manager do for one block."""

from __future__ import annotations

from itertools import count

from benchmarks.micro.benchmark import Benchmark, Work

_NUM_BLOCKS = 4096
_GROUP = 64
"""Blocks of one request."""
_ROUNDS = 50
_BLOCK_SIZE = 16


def _blank() -> Work:
    from penstock.kvcache import BlockPool

    pool = BlockPool(_NUM_BLOCKS)

    def run() -> None:
        for _ in range(_ROUNDS):
            pool.release(pool.allocate(_GROUP))

    return Work(run, _ROUNDS * _GROUP)


def _sharing() -> Work:
    from penstock.kvcache import BlockPool

    pool = BlockPool(_NUM_BLOCKS)
    blocks = pool.allocate(_GROUP)

    def run() -> None:
        for _ in range(_ROUNDS):
            pool.retain(blocks)
            pool.release(blocks)

    return Work(run, _ROUNDS * _GROUP)


def _evicting() -> Work:
    """A full pool whose blocks are all cached: every allocation evicts."""
    from penstock.kvcache import BlockPool

    pool = BlockPool(_NUM_BLOCKS)
    hashes = count()

    def run() -> None:
        for _ in range(_ROUNDS):
            blocks = pool.allocate(_GROUP)
            for block_id in blocks:
                pool.publish(block_id, next(hashes).to_bytes(16))
            pool.release(blocks)

    while not pool.num_evictions:
        run()
    return Work(run, _ROUNDS * _GROUP)


def _hashing() -> Work:
    from penstock.kvcache import BlockHasher

    hasher, tokens = BlockHasher(), list(range(1000, 1000 + _BLOCK_SIZE))

    def run() -> None:
        parent = hasher.root()
        for _ in range(200):
            parent = hasher.block(parent, tokens)

    return Work(run, 200)


def _prefix_hit() -> Work:
    """A prompt of 128 blocks that the cache holds, but for its last token: admitted and freed."""
    from penstock.kvcache import KVCacheManager, KVGroup

    manager = KVCacheManager(_NUM_BLOCKS, [KVGroup(_BLOCK_SIZE)])
    prompt = list(range(128 * _BLOCK_SIZE + 1))

    def run() -> int:
        admitted = manager.admit(prompt, manager.chains(), len(prompt))
        if admitted is None:
            raise RuntimeError("the pool is too small")
        tables, cached = admitted
        manager.publish(tables, prompt, len(prompt))
        manager.free(tables)
        return cached

    run()
    if run() != len(prompt) - 1:
        raise RuntimeError("the prompt is not in the cache")
    return Work(run, 128)


BENCHMARKS = (
    Benchmark("blocks/allocate-free", "block", _blank),
    Benchmark("blocks/share-free", "block", _sharing),
    Benchmark("blocks/allocate-evicting-publish-free", "block", _evicting),
    Benchmark("blocks/hash", "block of 16 tokens", _hashing),
    Benchmark("blocks/prefix-hit", "block of 16 tokens", _prefix_hit),
)
