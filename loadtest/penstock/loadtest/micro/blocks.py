"""Block operations: what the pool does for one block, whether that is giving, sharing, or taking it back."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.kvcache import BlockHasher, BlockPool
from penstock.loadtest.micro.timing import Measurement, measure

_NUM_BLOCKS = 4096
_GROUP = 64
"""Blocks of one request."""
_ROUNDS = 200


def _evicting() -> Measurement:
    """A full pool whose blocks are all cached: every allocation evicts. Five operations for each block."""
    pool = BlockPool(_NUM_BLOCKS)
    hashes = iter(range(1 << 62))

    def run() -> None:
        for _ in range(_ROUNDS):
            blocks = pool.allocate(_GROUP)
            for block_id in blocks:
                pool.publish(block_id, next(hashes).to_bytes(16))
            pool.retain(blocks)
            pool.release(blocks)
            pool.release(blocks)

    for _ in range(_NUM_BLOCKS // (_ROUNDS * _GROUP) + 1):
        run()
    return measure("block operation: allocate evicting, publish, share, free", _ROUNDS * _GROUP * 5, run)


def _blank() -> Measurement:
    pool = BlockPool(_NUM_BLOCKS)

    def run() -> None:
        for _ in range(_ROUNDS):
            blocks = pool.allocate(_GROUP)
            pool.release(blocks)

    return measure("block operation: allocate, free", _ROUNDS * _GROUP * 2, run)


def _hashing() -> Measurement:
    hasher, tokens = BlockHasher(), list(range(1000, 1016))

    def run() -> None:
        parent = hasher.root()
        for _ in range(2000):
            parent = hasher.block(parent, tokens)

    return measure("hash of a block of 16 tokens", 2000, run)


def measurements() -> Iterator[Measurement]:
    yield _evicting()
    yield _blank()
    yield _hashing()
