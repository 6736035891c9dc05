"""The sequences of a model: which there are, which slots of which instances they have, which wait for one, and their
implicit state.

No clock, no loop: times are passed in, in nanoseconds of time.monotonic_ns().
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from penstock.classic.batching.batch import CallSequence, SequenceId, SequenceSlot
from penstock.classic.model_config import ModelConfig, ModelSequenceBatching, datatype_name
from penstock.classic.model_files import stays_inside
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor, element_count, from_buffer
from penstock.engines.errors import InvalidRequestError


class SequenceTable:
    """Every sequence has a slot of its own, or stands in the backlog until one is free."""

    def __init__(self, instances: int, slots: int, idle_ns: int) -> None:
        self._idle_ns = idle_ns
        self._known: dict[SequenceId, CallSequence] = {}
        self._backlog: OrderedDict[CallSequence, None] = OrderedDict()
        self._idle: OrderedDict[CallSequence, int] = OrderedDict()
        """When they end, unless a request arrives. All have the same time, so the first is always the next to end."""
        self._numbers = count()
        self.slots = [[SequenceSlot(instance, index) for index in range(slots)] for instance in range(instances)]
        self._free: list[tuple[int, int, SequenceSlot]] = []
        self._retired: set[int] = set()
        # Low indexes first keep direct batches short. Of these the longest free one, so that all instances get work.
        for index in range(slots):
            for of_instance in self.slots:
                self._give_back(of_instance[index])

    def find(self, id: SequenceId) -> CallSequence | None:
        """The one that takes requests with this id now."""
        return self._known.get(id)

    def open(self, id: SequenceId) -> CallSequence:
        """A new sequence for an id that is not in use. It may have to wait for its slot."""
        sequence = self._known[id] = CallSequence(id)
        self._backlog[sequence] = None
        return sequence

    def seat(self) -> CallSequence | None:
        """Gives a free slot to the sequence that has waited longest. Call it until there is none."""
        if not self._free or not self._backlog:
            return None
        sequence = self._backlog.popitem(last=False)[0]
        slot = heapq.heappop(self._free)[2]
        slot.sequence = sequence
        sequence.slot = slot
        return sequence

    def forget(self, sequence: CallSequence) -> None:
        """Closes it: its id is free again. Its requests keep their order and their slot."""
        sequence.closed = True
        if self._known.get(sequence.id) is sequence:
            del self._known[sequence.id]

    def settle(self, sequence: CallSequence, now_ns: int) -> None:
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

    def retire(self, instance: int) -> list[CallSequence]:
        """The instance will execute nothing any more: its sequences, which are closed, and all in the backlog if there
        is no other instance."""
        self._retired.add(instance)
        self._free = [entry for entry in self._free if entry[2].instance != instance]
        heapq.heapify(self._free)
        sequences = [slot.sequence for slot in self.slots[instance] if slot.sequence is not None]
        if len(self._retired) == len(self.slots):
            sequences += self._backlog
        for sequence in sequences:
            self.forget(sequence)
        return sequences

    @property
    def empty(self) -> bool:
        """No sequence has a slot or waits for one."""
        return not self._backlog and all(slot.sequence is None for row in self.slots for slot in row)

    def _leave(self, sequence: CallSequence) -> None:
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            slot.sequence = None
            if slot.instance not in self._retired:
                self._give_back(slot)

    def _give_back(self, slot: SequenceSlot) -> None:
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


FOLDER = "initial_state"
"""Where in the model's folder the files of `data_file` lie."""

MAX_BYTES = 2**30
"""Of one initial state."""


class States:
    """What a model's states are, and where each sequence begins."""

    def __init__(self, config: ModelConfig, model_folder: Path) -> None:
        """Reads files. Raises InvalidRequestError when one is missing or too short."""
        batch = [1] if config.max_batch_size > 0 else []
        self._batch = len(batch)
        states = config.sequence_batching.state
        self._datatypes = {state.input_name: datatype_name(state.data_type) for state in states}
        self._initial = {state.input_name: _initial(state, batch, model_folder) for state in states}
        for array in self._initial.values():
            array.flags.writeable = False  # all sequences begin with the same one
        self._grow = any(dim < 0 for state in states for dim in state.dims)

    def __bool__(self) -> bool:
        return bool(self._initial)

    def shapes(self, sequence: CallSequence, start: bool) -> object:
        """What the states of two requests must have in common for these to be batched."""
        if not self._grow:
            return None
        current = self._initial if start or not sequence.states else sequence.states
        return tuple(array.shape[self._batch :] for array in current.values())

    def inputs(self, sequence: CallSequence, start: bool) -> dict[str, Tensor]:
        """The state inputs of the sequence's next request; `start` has it begin again."""
        if start or not sequence.states:
            sequence.states = dict(self._initial)
        return self._tensors(sequence.states)

    def blank(self, sequence: CallSequence) -> dict[str, Tensor]:
        """State inputs of the same shapes for a slot without a request."""
        return self._tensors({name: zeros(array.dtype, array.shape) for name, array in sequence.states.items()})

    def _tensors(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        return {name: Tensor(name, self._datatypes[name], array) for name, array in arrays.items()}


def zeros(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.full(shape, b"", np.object_) if dtype == np.object_ else np.zeros(shape, dtype)


def _initial(state: ModelSequenceBatching.State, batch: list[int], model_folder: Path) -> Array:
    """Variable dims are 1 where the configuration has no initial state."""
    datatype = datatype_name(state.data_type)
    dims = state.initial_state[0].dims if state.initial_state else [abs(dim) for dim in state.dims]
    shape = (*batch, *dims)
    expected = element_count(shape, state.input_name) * NUMPY_TYPES[datatype].itemsize
    if expected > MAX_BYTES:
        raise InvalidRequestError(f"the state '{state.input_name}' has more than {MAX_BYTES} bytes")
    if not state.initial_state or not state.initial_state[0].data_file:
        return zeros(NUMPY_TYPES[datatype], shape)
    initial = state.initial_state[0]
    data = _read(model_folder / FOLDER, initial.data_file)
    if datatype != "BYTES":
        if len(data) < expected:
            raise InvalidRequestError(
                f"initial_state setting expects {expected} bytes, but the data provided from {initial.data_file} only "
                f"has {len(data)} bytes."
            )
        data = data[:expected]
    return from_buffer(state.input_name, datatype, shape, data).array


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not stays_inside(name) or not path.is_file():
        raise InvalidRequestError(f"there is no file '{name}' in the model's {FOLDER} folder")
    if path.stat().st_size > MAX_BYTES:
        raise InvalidRequestError(f"the initial state '{name}' has more than {MAX_BYTES} bytes")
    return path.read_bytes()
