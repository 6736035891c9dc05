"""Blocks in shared memory: bounded, found by their hash, the oldest ones overwritten, and nothing is trusted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from penstock.engines.handover.memory import HandoverMemory
from penstock.engines.handover.shared_blocks import OwnRegion, SharedBlocks, SharedRegion, checksum_key, num_slots
from penstock.engines.offload.block_file import RECORD_BYTES, Contents

BLOCK = 64
HASHES = [bytes([k // 256, k % 256]) * 8 for k in range(2000)]


def contents(number: int) -> Contents:
    return np.full(BLOCK, number % 251, np.uint8)


@pytest.fixture
def memory() -> HandoverMemory:
    return HandoverMemory(2, 2 * 100 * (BLOCK + RECORD_BYTES))


@pytest.fixture
def opened(memory: HandoverMemory) -> Iterator[Callable[..., SharedRegion]]:
    made: list[SharedRegion] = []

    def make(
        kind: type[SharedRegion], number: int = 0, identity: str = "one", slots: int | None = None
    ) -> SharedRegion:
        config = memory.config(0)
        found = num_slots(config.region_bytes, BLOCK) if slots is None else slots
        made.append(kind(config.regions[number], found, BLOCK, checksum_key(config.key, identity)))
        return made[-1]

    yield make
    for region in made:
        region.close()


def read(shared: SharedBlocks, block_hash: bytes) -> Contents | None:
    return shared.read(shared.use(block_hash), block_hash)


def test_a_reader_finds_what_each_region_has(opened: Callable[..., SharedRegion]) -> None:
    first, second = opened(OwnRegion), opened(OwnRegion, 1)
    shared = SharedBlocks([opened(SharedRegion), opened(SharedRegion, 1)], max_reading=5)
    assert HASHES[0] not in shared
    assert read(shared, HASHES[0]) is None
    for number, region in enumerate((first, second)):
        assert isinstance(region, OwnRegion)
        region.write(HASHES[number], contents(number))
    for number in range(2):
        found = read(shared, HASHES[number])
        assert found is not None
        assert found.tolist() == contents(number).tolist()
    assert HASHES[2] not in shared


@pytest.mark.parametrize("slots", [1, 5, 100])
def test_the_newest_stay_within_the_bound(
    opened: Callable[..., SharedRegion], memory: HandoverMemory, slots: int
) -> None:
    own = opened(OwnRegion, slots=slots)
    assert isinstance(own, OwnRegion)
    for number, block_hash in enumerate(HASHES):
        own.write(block_hash, contents(number))
        assert own.find(block_hash) is not None
        assert own.num_kept <= own.num_slots <= slots
    assert own.num_kept == own.num_slots
    assert own.keeps(HASHES[-1]) == (slots > 1), "with a single slot everything is about to be overwritten"
    assert not own.keeps(HASHES[0])
    recent = HASHES[-(own.num_slots // 3) :] if slots > 3 else HASHES[-1:]
    assert all(own.find(block_hash) is not None for block_hash in recent)
    sizes = [os.fstat(descriptor).st_size for descriptor in memory._descriptors[:2]]
    assert sizes == [own.num_slots * BLOCK, own.num_slots * RECORD_BYTES]


def test_the_same_block_again_takes_no_second_slot(opened: Callable[..., SharedRegion]) -> None:
    own = opened(OwnRegion)
    assert isinstance(own, OwnRegion)
    for _ in range(3):
        own.write(HASHES[0], contents(0))
    assert own.num_kept == 1
    own.clear()
    assert (own.num_kept, own.find(HASHES[0])) == (0, None)


def test_who_opens_it_again_goes_on_where_the_last_one_was(opened: Callable[..., SharedRegion]) -> None:
    own = opened(OwnRegion, slots=5)
    assert isinstance(own, OwnRegion)
    for number in range(7):
        own.write(HASHES[number], contents(number))
    again = opened(OwnRegion, slots=5)
    assert isinstance(again, OwnRegion)
    assert again.num_kept == 5
    again.write(HASHES[7], contents(7))
    assert again.find(HASHES[2]) is None, "the oldest one"
    assert again.find(HASHES[3]) is not None


def test_blocks_of_other_weights_are_not_read(opened: Callable[..., SharedRegion]) -> None:
    own = opened(OwnRegion, identity="other")
    assert isinstance(own, OwnRegion)
    own.write(HASHES[0], contents(0))
    assert read(SharedBlocks([opened(SharedRegion)], 5), HASHES[0]) is None
    assert read(SharedBlocks([opened(SharedRegion, identity="other")], 5), HASHES[0]) is not None


def test_a_block_that_is_overwritten_while_it_is_read_is_not_taken(
    opened: Callable[..., SharedRegion], memory: HandoverMemory
) -> None:
    own, shared = opened(OwnRegion), SharedBlocks([opened(SharedRegion)], 5)
    assert isinstance(own, OwnRegion)
    own.write(HASHES[0], contents(0))
    slot = shared.use(HASHES[0])
    os.pwrite(memory._descriptors[0], b"half", slot * BLOCK + BLOCK // 2)
    assert shared.read(slot, HASHES[0]) is None
