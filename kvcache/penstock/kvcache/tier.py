"""The tier behind the pool: which evicted blocks have their contents kept elsewhere. Hashes and slots, no contents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from penstock.kvcache.integrity import require
from penstock.kvcache.pool import BlockHash


class BlockSave(NamedTuple):
    """A block's contents go into a slot of the tier."""

    block_id: int
    slot: int
    block_hash: BlockHash


class BlockSource(Protocol):
    """Where contents of blocks can be read that the pool does not have."""

    @property
    def max_reading(self) -> int:
        """Blocks that may be read and not in the pool yet."""
        ...

    @property
    def is_empty(self) -> bool:
        """Nothing can be found there."""
        ...

    def __contains__(self, block_hash: object) -> bool:
        """It can be read, or could be a moment ago: readers check what they get."""
        ...

    def use(self, block_hash: BlockHash) -> int:
        """The slot of one that was there a moment ago. It counts as used now."""
        ...


class BlockTier:
    """Slots 0..num_slots-1 of a store, each in exactly one of three places.

    - blank: holds nothing worth keeping
    - being written: reserved for a hash, and cannot be found yet
    - kept: found by its hash; the least recently used one is the first to be overwritten

    A store may lose what it keeps. So a reader checks that the slot holds what the hash says, and calls `forget` where
    it does not.
    """

    def __init__(self, num_slots: int, max_writing: int, max_reading: int) -> None:
        """`max_writing`: blocks that may wait to be written, beyond which they are dropped; `max_reading`: those that
        may be read and not in the pool yet."""
        if min(num_slots, max_writing, max_reading) < 1:
            raise ValueError(f"no such tier: {num_slots} slots, {max_writing} being written, {max_reading} read")
        self.num_slots = num_slots
        self.num_saved = 0
        """Blocks written since the start."""
        self.num_dropped = 0
        """Blocks that were evicted and not written, since the start."""
        self.takes_more = False
        """Whether blocks are taken in: not before `open`."""
        self.max_reading = max_reading
        self.max_writing = max_writing
        self._num_used = 0
        """Slots from here on have never been used."""
        self._blank: list[int] = []
        self._writing: dict[BlockHash, int] = {}
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()

    def open(self, kept: Iterable[tuple[BlockHash, int]] = ()) -> None:
        """The store is there, and holds these already, the least recently used first. Of two slots with the same hash
        the later one counts."""
        self.clear()
        for block_hash, slot in kept:
            self._kept[block_hash] = slot
            self._kept.move_to_end(block_hash)
        self._num_used = max(self._kept.values(), default=-1) + 1
        if self._num_used > self.num_slots:
            raise ValueError(f"slot {self._num_used - 1} of {self.num_slots}")
        self._blank = sorted(set(range(self._num_used)) - set(self._kept.values()), reverse=True)
        self.takes_more = True

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def __contains__(self, block_hash: object) -> bool:
        """It can be read."""
        return block_hash in self._kept

    def knows(self, block_hash: BlockHash) -> bool:
        """It can be read, or soon."""
        return block_hash in self._kept or block_hash in self._writing

    def use(self, block_hash: BlockHash) -> int:
        """The slot of one that is kept. It counts as used now."""
        self._kept.move_to_end(block_hash)
        return self._kept[block_hash]

    def reserve(self, block_hash: BlockHash) -> int | None:
        """The slot to write a block to; `written` comes next. None: the tier knows it already, takes no more, or is
        behind."""
        if block_hash in self._kept:
            self._kept.move_to_end(block_hash)
        if self.knows(block_hash):
            return None
        slot = self._take_slot() if self.takes_more and len(self._writing) < self.max_writing else None
        if slot is None:
            self.num_dropped += 1
        else:
            self._writing[block_hash] = slot
        return slot

    def _take_slot(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        if self._num_used < self.num_slots:
            self._num_used += 1
            return self._num_used - 1
        return self._kept.popitem(last=False)[1] if self._kept else None

    def written(self, block_hash: BlockHash, slot: int, *, succeeded: bool) -> None:
        """The end of what `reserve` began; ignored if the tier was cleared in between."""
        if self._writing.get(block_hash) != slot:
            return
        del self._writing[block_hash]
        if succeeded:
            self._kept[block_hash] = slot
            self.num_saved += 1
        else:
            self._blank.append(slot)
            self.num_dropped += 1

    def forget(self, block_hash: BlockHash, slot: int) -> bool:
        """The slot did not hold what it should. False: nor does it have to any more."""
        if self._kept.get(block_hash) != slot:
            return False
        del self._kept[block_hash]
        self._blank.append(slot)
        return True

    def clear(self) -> None:
        """Nothing is kept any more, nor will be of what is being written."""
        self._num_used = 0
        self._blank.clear()
        self._writing.clear()
        self._kept.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every used slot is in exactly one place."""
        slots = [*self._blank, *self._writing.values(), *self._kept.values()]
        require(sorted(slots) == list(range(self._num_used)), "a slot of the tier is lost, or in two places")
        require(self._num_used <= self.num_slots, "the tier has more slots than it may have")
        require(not self._writing.keys() & self._kept.keys(), "a block is being written that is kept already")
        require(len(self._writing) <= self.max_writing, "too many blocks wait to be written")
