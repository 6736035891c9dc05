"""The sequences of a model: which there are, which slots of which instances they have, which wait for one.

No clock, no loop: times are passed in, in nanoseconds of time.monotonic_ns().
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from itertools import count
from typing import TYPE_CHECKING

from penstock.classic.tensors import Array

if TYPE_CHECKING:
    from penstock.classic.call import Call

SequenceId = tuple[str, int | str]
"""The caller's tenant, and the correlation id: tenants may choose the same ids, and share no sequence."""


class Slot:
    """A place in an instance. With the direct strategy it is also the place in the instance's batches."""

    __slots__ = ("index", "instance", "sequence")

    def __init__(self, instance: int, index: int) -> None:
        self.instance = instance
        self.index = index
        self.sequence: Sequence | None = None


class Sequence:
    __slots__ = ("calls", "closed", "id", "running", "slot", "states")

    def __init__(self, id: SequenceId) -> None:
        self.id = id
        self.calls: deque[Call] = deque()
        """Those that wait, in the order of their arrival."""
        self.running = 0
        """Of its requests: those that are executed now."""
        self.slot: Slot | None = None
        self.closed = False
        """It takes no further requests."""
        self.states: dict[str, Array] = {}
        """Implicit state, by the names of the inputs."""


class SequenceTable:
    """Every sequence has a slot of its own, or stands in the backlog until one is free."""

    def __init__(self, instances: int, slots: int, idle_ns: int) -> None:
        self._idle_ns = idle_ns
        self._known: dict[SequenceId, Sequence] = {}
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._idle: OrderedDict[Sequence, int] = OrderedDict()
        """When they end, unless a request arrives. All have the same time, so the first is always the next to end."""
        self._numbers = count()
        self.slots = [[Slot(instance, index) for index in range(slots)] for instance in range(instances)]
        self._free: list[tuple[int, int, Slot]] = []
        self._retired: set[int] = set()
        # Low indexes first keep direct batches short. Of these the longest free one, so that all instances get work.
        for index in range(slots):
            for of_instance in self.slots:
                self._give_back(of_instance[index])

    def find(self, id: SequenceId) -> Sequence | None:
        """The one that takes requests with this id now."""
        return self._known.get(id)

    def open(self, id: SequenceId) -> Sequence:
        """A new sequence for an id that is not in use. It may have to wait for its slot."""
        sequence = self._known[id] = Sequence(id)
        self._backlog[sequence] = None
        return sequence

    def seat(self) -> Sequence | None:
        """Gives a free slot to the sequence that has waited longest. Call it until there is none."""
        if not self._free or not self._backlog:
            return None
        sequence = self._backlog.popitem(last=False)[0]
        slot = heapq.heappop(self._free)[2]
        slot.sequence = sequence
        sequence.slot = slot
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Closes it: its id is free again. Its requests keep their order and their slot."""
        sequence.closed = True
        if self._known.get(sequence.id) is sequence:
            del self._known[sequence.id]

    def settle(self, sequence: Sequence, now_ns: int) -> None:
        """After a change of its requests: without any it is idle, or gives its slot back if it is closed."""
        if sequence.calls or sequence.running:
            self._idle.pop(sequence, None)
        elif sequence.closed:
            self._leave(sequence)
        elif sequence not in self._idle:
            self._idle[sequence] = now_ns + self._idle_ns

    def next_idle_end(self) -> int | None:
        return next(iter(self._idle.values()), None)

    def end_idle(self, now_ns: int) -> None:
        """Ends the sequences that have had no request for too long."""
        while (when := self.next_idle_end()) is not None and when <= now_ns:
            sequence = self._idle.popitem(last=False)[0]
            self.forget(sequence)
            self._leave(sequence)

    def close_all(self, now_ns: int) -> None:
        """No sequence takes further requests; those that have none left end."""
        for sequence in list(self._known.values()):
            self.forget(sequence)
            self.settle(sequence, now_ns)

    def retire(self, instance: int) -> list[Sequence]:
        """The instance will execute nothing any more: its sequences, which are closed, and all in the backlog if there
        is no other instance."""
        self._retired.add(instance)
        self._free = [entry for entry in self._free if entry[2].instance != instance]
        heapq.heapify(self._free)
        found = [slot.sequence for slot in self.slots[instance] if slot.sequence is not None]
        if len(self._retired) == len(self.slots):
            found += self._backlog
        for sequence in found:
            self.forget(sequence)
        return found

    @property
    def empty(self) -> bool:
        """No sequence has a slot or waits for one."""
        return not self._backlog and all(slot.sequence is None for each in self.slots for slot in each)

    def _leave(self, sequence: Sequence) -> None:
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            slot.sequence = None
            if slot.instance not in self._retired:
                self._give_back(slot)

    def _give_back(self, slot: Slot) -> None:
        heapq.heappush(self._free, (slot.index, next(self._numbers), slot))

    def check_integrity(self) -> None:
        """Raises AssertionError when a slot or a sequence is where it must not be. For tests."""
        free = {entry[2] for entry in self._free}
        for slot in (slot for of_instance in self.slots for slot in of_instance):
            if slot.instance not in self._retired:
                assert (slot.sequence is None) == (slot in free)
            assert slot.sequence is None or slot.sequence.slot is slot
        for id, sequence in self._known.items():
            assert sequence.id == id
            assert not sequence.closed
            assert (sequence.slot is None) == (sequence in self._backlog)
            assert (sequence in self._idle) == (not sequence.calls and not sequence.running)
        assert all(not sequence.closed or sequence.calls for sequence in self._backlog)
        assert not (free and self._backlog)
