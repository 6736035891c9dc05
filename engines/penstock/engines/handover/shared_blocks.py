"""Blocks in memory that several engines share: each region is written by one of them and read by all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from penstock.engines.handover.settings import Region
from penstock.engines.offload.block_file import RECORD_BYTES, BlockFile, Contents
from penstock.kvcache import BlockHash

_WAYS = 32
"""Slots in which a block may be. With so many, a block almost always stays until others have been written that take
half of the region."""


class SharedRegion:
    """A block's hash says in which set of slots it is. So readers need no message of what is written: they look into
    the index, and check what they read. The oldest block of a set is the first to be overwritten."""

    def __init__(self, region: Region, num_slots: int, block_bytes: int, key: bytes) -> None:
        """Raises OSError."""
        self._ways = min(_WAYS, num_slots)
        self._num_sets = num_slots // self._ways
        self.num_slots = self._num_sets * self._ways
        self._file = BlockFile(Path(region.contents), Path(region.index), self.num_slots, block_bytes, key)

    def find(self, block_hash: BlockHash) -> tuple[int, int] | None:
        """(slot, number of its write). Raises OSError."""
        for number, known, slot in self._records(block_hash):
            if known == block_hash:
                return slot, number
        return None

    def _records(self, block_hash: BlockHash) -> list[tuple[int, BlockHash, int]]:
        chosen = int.from_bytes(block_hash) % self._num_sets
        return self._file.records(chosen * self._ways, self._ways)

    def read(self, slot: int, block_hash: BlockHash) -> Contents | None:
        """As `BlockFile.read`."""
        return self._file.read(slot, block_hash)

    def close(self) -> None:
        self._file.close()


class OwnRegion(SharedRegion):
    """The region that this engine writes."""

    def __init__(self, region: Region, num_slots: int, block_bytes: int, key: bytes) -> None:
        """Raises OSError."""
        super().__init__(region, num_slots, block_bytes, key)
        self.num_kept = len(self._file.kept())
        """Slots that hold a block."""

    def keeps(self, block_hash: BlockHash) -> bool:
        """It is there, and not among the next to be overwritten. Raises OSError."""
        place = self.find(block_hash)
        return place is not None and place[1] > self._file.num_writes - self.num_slots // 2

    def write(self, block_hash: BlockHash, contents: Contents) -> None:
        """`contents`: [block bytes]. Raises OSError."""
        records = self._records(block_hash)
        own = [slot for _, known, slot in records if known == block_hash]
        slot = own[0] if own else self._blank_slot(block_hash, records)
        if slot is None:
            _, _, slot = min(records)
        self._file.write(slot, block_hash, contents)
        self.num_kept += len(records) < self._ways and not own

    def _blank_slot(self, block_hash: BlockHash, records: Sequence[tuple[int, BlockHash, int]]) -> int | None:
        first = int.from_bytes(block_hash) % self._num_sets * self._ways
        blank = set(range(first, first + self._ways)) - {slot for _, _, slot in records}
        return min(blank, default=None)

    def clear(self) -> None:
        """Raises OSError."""
        self._file.clear()
        self.num_kept = 0


class SharedBlocks:
    """A BlockSource: what is in any of the regions."""

    is_empty = False
    """Who knows what others are writing."""

    def __init__(self, regions: Sequence[SharedRegion], max_reading: int) -> None:
        """Of equal sizes."""
        self._regions = regions
        self._num_slots = regions[0].num_slots
        self.max_reading = max_reading

    def __contains__(self, block_hash: object) -> bool:
        return isinstance(block_hash, bytes) and self._find(block_hash) is not None

    def use(self, block_hash: BlockHash) -> int:
        """A slot of all regions, counted through; -1 if it has gone."""
        slot = self._find(block_hash)
        return -1 if slot is None else slot

    def _find(self, block_hash: BlockHash) -> int | None:
        for number, region in enumerate(self._regions):
            place = region.find(block_hash)
            if place is not None:
                return number * self._num_slots + place[0]
        return None

    def read(self, slot: int, block_hash: BlockHash) -> Contents | None:
        """The contents, [block bytes]; None: it has gone, or is damaged. On any thread. Raises OSError."""
        if slot < 0:
            return None
        number, slot = divmod(slot, self._num_slots)
        return self._regions[number].read(slot, block_hash)

    def close(self) -> None:
        for region in self._regions:
            region.close()


def num_slots(region_bytes: int, block_bytes: int) -> int:
    """That a region of so many bytes has."""
    return region_bytes // (block_bytes + RECORD_BYTES)


def checksum_key(key: bytes, identity: str) -> bytes:
    """Engines whose blocks have other contents (`BlockHost.cache_identity`) do not take them for their own."""
    return hashlib.blake2b(identity.encode(), key=key, digest_size=32).digest()
