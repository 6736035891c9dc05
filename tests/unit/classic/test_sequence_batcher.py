"""Sequences without a clock and without a loop: rules one by one, then a state machine over all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.classic.batching.batch import QueuedCall
from penstock.classic.batching.sequences.batcher import PaddingCall, SequenceBatcher
from penstock.classic.messages import InferRequest, InferResponse, WarmUpRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PenstockError,
    QueueTimeoutError,
)
from support.classic import ECHO, model_config

US = 1000
IDLE = 1_000_000 * US
"""The default of max_sequence_idle_microseconds."""


CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] }
"""


class Item(QueuedCall):
    def deliver(self, response: InferResponse) -> None:
        raise AssertionError("nothing is executed here")

    def __repr__(self) -> str:
        return f"{self.request.correlation_id}:{self.request.id}"


def batcher(text: str = "", *, instances: int = 1, max_batch_size: int = 4) -> SequenceBatcher:
    config = model_config(ECHO, f"sequence_batching {{ {text} }}")
    config.max_batch_size = max_batch_size
    return SequenceBatcher(config, Path("."), instances)


def item(of: int | str, start: bool = False, end: bool = False, *, size: int = 1, **fields: object) -> Item:
    made = InferRequest(
        inputs={"INPUT0": Tensor("INPUT0", "INT32", np.full((size, 1), 7, np.int32))},
        correlation_id=of,
        sequence_start=start,
        sequence_end=end,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return Item(made, size)


def added(to: SequenceBatcher, *items: Item, now: int = 0) -> None:
    for each in items:
        to.add(each, now)


def took(of: SequenceBatcher, instance: int = 0, now: int = 0) -> list[int | str | None]:
    """The ids of the next batch, None for padding; it has been executed at once."""
    batch = of.take(now, instance)
    of.released(batch, now)
    return [None if isinstance(call, PaddingCall) else call.request.correlation_id for call in batch]


def controls(batch: list[QueuedCall], *names: str) -> list[list[object]]:
    return [[call.request.inputs[name].array.ravel().tolist()[0] for name in names] for call in batch]


ALL = """
    control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 3, 4 ] } }
    control_input { name: "E" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 0.5 ] } }
    control_input { name: "R" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
"""


def test_requests_of_a_sequence_go_one_after_the_other() -> None:
    of = batcher()
    added(of, item(1, start=True), item(1), item(1, end=True))
    assert [took(of) for _ in range(4)] == [[1], [1], [1], []]


def test_a_slot_without_a_request_is_padded_and_those_at_the_end_are_not() -> None:
    of = batcher()
    added(of, item(1, start=True), item(2, start=True), item(3, start=True))
    assert took(of) == [1, 2, 3]
    added(of, item(2))
    assert took(of) == [None, 2]


def test_padding_says_that_it_is_not_ready() -> None:
    of = batcher(ALL)
    added(of, item(1, start=True), item(2, start=True, end=True))
    batch = of.take(0, 0)
    assert controls(batch, "S", "E", "R") == [[4, -1, True], [4, 0.5, True]]
    of.released(batch, 0)
    added(of, item(3, start=True), item(3, end=True))
    took(of)
    batch = of.take(0, 0)
    assert controls(batch, "S", "E", "R", "INPUT0") == [[3, -1, False, 0], [3, 0.5, True, 7]]
    assert [call.request.inputs["S"].array.shape for call in batch] == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("datatype", "id", "seen"),
    [
        ("UINT64", 2**64 - 1, 2**64 - 1),
        ("INT64", 2**64 - 1, -1),
        ("UINT32", 2**32 + 5, 5),
        ("INT32", 2**32 - 2, -2),
        ("STRING", "a chat", b"a chat"),
        ("STRING", 42, b"42"),
    ],
)
def test_ids_of_every_type(datatype: str, id: int | str, seen: object) -> None:
    control = f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype}"
    of = batcher(f'control_input {{ name: "C" control {{ {control} }} }}')
    added(of, item(id, start=True))
    assert controls(of.take(0, 0), "C") == [[seen]]


def test_an_id_of_letters_needs_a_tensor_that_holds_it() -> None:
    of = batcher('control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }')
    with pytest.raises(InvalidRequestError, match="must specify an integer as correlation ID"):
        of.add(item("a", start=True), 0)
    assert len(of) == 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (item(5), "inference request for sequence 5 to model 'echo' must specify the START flag on the first request"),
        (item(0, start=True), "must specify a non-zero or non-empty correlation ID"),
        (item("", start=True), "must specify a non-zero or non-empty correlation ID"),
        (item(5, start=True, size=2), "must specify batch-size 1 due to requirements of sequence batcher"),
    ],
)
def test_what_is_no_part_of_a_sequence_is_refused(wrong: Item, text: str) -> None:
    of = batcher()
    with pytest.raises(InvalidRequestError, match=text):
        of.add(wrong, 0)
    assert len(of) == 0


def test_ids_of_digits_and_numbers_differ() -> None:
    of = batcher()
    added(of, item(5, start=True))
    with pytest.raises(InvalidRequestError, match="START"):
        of.add(item("5"), 0)


def test_tenants_share_no_sequence() -> None:
    of = batcher()
    added(of, item(1, start=True, tenant="a"))
    with pytest.raises(InvalidRequestError, match="START flag"):
        of.add(item(1, tenant="b"), 0)
    added(of, item(1, start=True, tenant="b"), item(1, end=True, tenant="a"))
    first, second = of.take(0, 0)
    assert [call.request.tenant for call in (first, second)] == ["a", "b"]
    of.released([first, second], 0)
    assert first.sequence is not second.sequence
    assert [call.request.tenant for call in of.take(0, 0)] == ["a"]


def test_sequences_are_spread_over_instances_and_stay_there() -> None:
    of = batcher(instances=2)
    added(of, *(item(id, start=True) for id in (1, 2, 3)))
    assert took(of, 0) == [1, 3]
    assert took(of, 1) == [2]
    added(of, *(item(id) for id in (3, 2, 1)))
    assert took(of, 1) == [2]
    assert took(of, 0) == [1, 3]


def test_the_backlog_gets_slots_in_its_order() -> None:
    of = batcher(max_batch_size=1)
    added(of, item(1, start=True), item(2, start=True), item(3, start=True, end=True), item(2, end=True))
    assert took(of) == [1]
    assert took(of) == []
    added(of, item(1, end=True))
    assert [took(of) for _ in range(5)] == [[1], [2], [2], [3], []]


def test_a_sequence_that_is_idle_ends() -> None:
    of = batcher(max_batch_size=1)
    added(of, item(1, start=True), item(2, start=True, end=True))
    assert took(of, now=5) == [1]
    assert of.next_expiry() == 5 + IDLE
    assert of.expire(4 + IDLE) == []
    assert took(of) == []
    assert of.expire(5 + IDLE) == []
    assert took(of) == [2]
    with pytest.raises(InvalidRequestError, match="START"):
        of.add(item(1), 6 + IDLE)


def test_what_waits_or_is_executed_is_not_idle() -> None:
    of = batcher()
    added(of, item(1, start=True))
    batch = of.take(0, 0)
    added(of, item(1))
    of.expire(10 * IDLE)
    of.released(batch, 10 * IDLE)
    assert took(of, now=10 * IDLE) == [1]
    assert of.next_expiry() == 11 * IDLE


def test_a_cancelled_request_ends_its_sequence() -> None:
    of = batcher(max_batch_size=1)
    first, second, third = item(1, start=True), item(1), item(1)
    added(of, first, second, third, item(2, start=True, end=True))
    assert of.remove(second)
    assert not of.remove(second)
    assert [(call, type(error)) for call, error in of.expire(0)] == [(third, CancelledError)]
    with pytest.raises(InvalidRequestError, match="START"):
        of.add(item(1), 0)
    assert [took(of) for _ in range(3)] == [[1], [2], []]


def test_a_deadline_ends_a_sequence() -> None:
    of = batcher()
    late, behind = item(1, start=True, deadline=1e-9), item(1)
    added(of, late, behind)
    ended = dict(of.expire(1))
    assert {call: type(error) for call, error in ended.items()} == {
        late: DeadlineExceededError,
        behind: CancelledError,
    }
    assert took(of) == []


def test_time_is_over_only_in_the_backlog() -> None:
    of = batcher(max_batch_size=1)
    seated, waiting, behind = item(1, start=True, timeout_us=5), item(2, start=True, timeout_us=5), item(2)
    added(of, seated, waiting, behind)
    assert [(call, type(error)) for call, error in of.expire(5 * US)] == [
        (waiting, QueueTimeoutError),
        (behind, QueueTimeoutError),
    ]
    assert took(of) == [1]


def test_a_new_start_goes_behind_what_is_there() -> None:
    of = batcher(ALL)
    added(of, item(1, start=True), item(1), item(1, start=True))
    seen = []
    for _ in range(3):
        batch = of.take(0, 0)
        seen += controls(batch, "S")
        of.released(batch, 0)
    assert seen == [[4], [3], [4]]


def test_direct_waits_for_its_slots() -> None:
    of = batcher("direct { max_queue_delay_microseconds: 10 minimum_slot_utilization: 0.5 }")
    added(of, item(1, start=True))
    assert took(of) == []
    assert of.delay_ends == 10 * US
    assert took(of, now=10 * US) == [1]
    added(of, item(1), item(2, start=True), now=20 * US)
    assert took(of, now=20 * US) == [1, 2]


def test_oldest_has_the_preferred_size_or_waits() -> None:
    of = batcher("oldest { max_candidate_sequences: 8 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 10 }")
    added(of, item(1, start=True))
    assert took(of) == []
    assert of.delay_ends == 10 * US
    added(of, item(1), item(2, start=True), now=US)
    assert took(of, now=US) == [1, 2]
    assert took(of, now=US) == []
    assert took(of, now=11 * US) == [1]


def test_oldest_has_one_request_of_a_sequence_in_a_batch_and_no_padding() -> None:
    of = batcher("oldest { max_candidate_sequences: 3 }")
    added(of, *(item(id, start=True) for id in (1, 2, 3, 4)), item(1), item(3))
    assert took(of) == [1, 2, 3]
    assert took(of) == [1, 3]
    added(of, item(2, end=True))
    assert took(of) == [2]
    assert took(of) == [4]


def test_iterative_requests_make_their_sequences_and_end_them() -> None:
    of = batcher("iterative_sequence: true " + ALL)
    call = item(0)
    of.add(call, 0)
    batch = of.take(0, 0)
    assert controls(batch, "S") == [[4]]
    call.reschedule()
    assert of.released(batch, 0) == [call]
    added(of, item(0))
    batch = of.take(0, 0)
    assert controls(batch, "S") == [[3], [4]]
    assert of.released(batch, 0) == []
    assert of.next_expiry() is None


def test_requests_of_different_shapes_do_not_share_a_batch() -> None:
    of = batcher()
    large = item(2, start=True)
    large.shapes = "large"
    added(of, item(1, start=True), large, item(3, start=True))
    assert took(of) == [1, None, 3]
    added(of, item(1))
    assert took(of) == [None, 2]
    assert took(of) == [1]


def test_closed_sequences_end_with_what_they_have() -> None:
    of = batcher(max_batch_size=1)
    added(of, item(1, start=True), item(2, start=True))
    took(of)
    of.close(0)
    assert [took(of), took(of)] == [[2], []]
    assert len(of) == 0


@pytest.mark.parametrize("text", ["direct { }", "oldest { max_candidate_sequences: 2147483647 }"])
def test_slots_have_their_bounds(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"slots .* the most is 262144"):
        batcher(text, instances=2, max_batch_size=2**31 - 1)


def test_a_lost_instance_ends_its_sequences() -> None:
    of = batcher(instances=2, max_batch_size=1)
    first, other = item(1, start=True), item(3, start=True)
    added(of, first, item(2, start=True), other)
    of.retire(0, EngineError("lost"))
    assert [(call, type(error)) for call, error in of.expire(0)] == [(first, EngineError)]
    assert took(of, 1) == [2]
    of.retire(1, EngineError("lost"))
    assert [call for call, _ in of.expire(0)] == [other]


class Sequences(RuleBasedStateMachine):
    """Whatever comes in whatever order: each request leaves once, in its sequence's order, where its sequence is."""

    @initialize(oldest=st.booleans(), instances=st.integers(1, 3), size=st.integers(1, 3), candidates=st.integers(1, 4))
    def make(self, oldest: bool, instances: int, size: int, candidates: int) -> None:
        text = f"oldest {{ max_candidate_sequences: {candidates} }}" if oldest else "direct { }"
        self.of = batcher(text + "max_sequence_idle_microseconds: 50", instances=instances, max_batch_size=size)
        self.oldest = oldest
        self.now = 0
        self.number = 0
        self.places: dict[object, tuple[int, int]] = {}
        """Where each sequence's requests have been executed."""
        self.waiting: dict[int, list[Item]] = {}
        """Admitted and not ended, by id."""
        self.running: dict[int, list[QueuedCall]] = {}
        self.instances = instances
        self.admitted = self.left = 0

    @rule(id=st.integers(1, 4), start=st.booleans(), end=st.booleans(), timeout=st.sampled_from([0, 0, 30]))
    def add(self, id: int, start: bool, end: bool, timeout: int) -> None:
        self.number += 1
        made = item(id, start, end, id=str(self.number), timeout_us=timeout)
        try:
            self.of.add(made, self.now)
        except InvalidRequestError:
            assert not start
            return
        self.admitted += 1
        self.waiting.setdefault(id, []).append(made)

    @rule(us=st.integers(1, 60))
    def pass_time(self, us: int) -> None:
        self.now += us * US
        self.end(self.of.expire(self.now))

    def end(self, ended: list[tuple[QueuedCall, PenstockError]]) -> None:
        for call, _ in ended:
            self.waiting[call.request.correlation_id].remove(call)  # type: ignore[index, arg-type]
            self.left += 1

    @rule(instance=st.integers(0, 2))
    def take(self, instance: int) -> None:
        if instance >= self.instances or instance in self.running:
            return
        batch = self.of.take(self.now, instance)
        real = [call for call in batch if not isinstance(call, PaddingCall)]
        assert len({call.sequence for call in real}) == len(real)
        assert not batch or real
        for row, call in enumerate(batch):
            if isinstance(call, PaddingCall):
                assert not self.oldest
                continue
            mine = self.waiting[call.request.correlation_id]  # type: ignore[index]
            assert call is next(one for one in mine if one.sequence is call.sequence)
            mine.remove(call)
            self.left += 1
            place = self.places.setdefault(call.sequence, (instance, 0 if self.oldest else row))
            assert place == (instance, 0 if self.oldest else row)
        if batch:
            self.running[instance] = batch

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        instance = sorted(self.running)[which % len(self.running)]
        assert self.of.released(self.running.pop(instance), self.now) == []

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        everything = [call for calls in self.waiting.values() for call in calls]
        if everything:
            call = everything[which % len(everything)]
            assert self.of.remove(call)
            self.waiting[call.request.correlation_id].remove(call)  # type: ignore[index]
            self.left += 1
            self.end(self.of.expire(self.now))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.of) == self.admitted - self.left == sum(map(len, self.waiting.values()))
        self.of.check_integrity()

    def teardown(self) -> None:
        """When no sequence takes more requests, everything is executed, and every slot is free."""
        if not hasattr(self, "of"):
            return
        self.of.close(self.now)
        for _ in range(self.admitted + 1):
            for batch in self.running.values():
                self.of.released(batch, self.now)
            self.running.clear()
            for instance in range(self.instances):
                self.take(instance)
        assert len(self.of) == 0
        assert self.of.idle


Sequences.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSequences = Sequences.TestCase


def warm_up(id: int) -> Item:
    five = np.full((1, 1), 5, np.int32)
    request = WarmUpRequest(
        inputs={"INPUT0": Tensor("INPUT0", "INT32", five)},
        correlation_id=id,
        sequence_start=True,
        sequence_end=True,
        overrides={name: Tensor(name, "INT32", five) for name in ("START", "S")},
    )
    return Item(request, 1)


def values(call: QueuedCall) -> dict[str, int]:
    return {name: int(tensor.array[0, 0]) for name, tensor in call.request.inputs.items()}


def test_a_warm_up_has_its_own_controls_and_states() -> None:
    sequences = batcher(CONTROLS)
    sequences.add(warm_up(1), 0)
    sequences.expire(0)
    [call] = sequences.take(0, 0)
    assert values(call) == {"INPUT0": 5, "START": 5, "END": 1, "S": 5}


def test_slots_beside_a_warm_up_have_its_values() -> None:
    """A model that reads its texts as numbers fails on empty ones."""
    sequences = batcher(CONTROLS)
    sequences.add(warm_up(1), 0)
    sequences.expire(0)
    sequences.released(sequences.take(0, 0), 0)
    sequences.add(warm_up(2), 0)
    sequences.add(warm_up(3), 0)
    sequences.expire(0)
    sequences.remove(next(iter(sequences)))
    [padding, _] = batch = sequences.take(0, 0)
    assert isinstance(padding, PaddingCall)
    assert [values(call) for call in batch] == [{"INPUT0": 5, "START": 5, "END": 1, "S": 5}] * 2
