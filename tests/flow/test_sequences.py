"""Models with sequences without a server around them: the loop, instances, Python models that reschedule requests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import Batch
from penstock.classic.loading import ClassicModel
from penstock.engines.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
)
from support.classic import ECHO, FunctionBackend, Gate, check_books, echo_request, model_config, output, served, until
from support.python_backend import CPU, loaded, outputs, request

SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 %s }"


def sequences(text: str = "", *more: str) -> Any:
    return model_config(ECHO, SEQUENCES % text, *more)


def step(id: int | str, value: int = 1, start: bool = False, end: bool = False, **fields: Any) -> Any:
    return echo_request(value, correlation_id=id, sequence_start=start, sequence_end=end, **fields)


async def test_requests_of_a_sequence_stay_on_their_instance() -> None:
    seen: dict[int, set[str]] = {}
    lock = threading.Lock()

    def make(context: Any) -> Any:
        def execute(batch: Batch) -> None:
            with lock:
                for call in batch.calls:
                    seen.setdefault(int(call.request.inputs["INPUT0"].array[0, 0]), set()).add(context.name)
            batch.scatter({"OUTPUT0": batch.gather()["INPUT0"]})

        return execute

    async with served(sequences("", "instance_group { count: 3 kind: KIND_CPU }"), FunctionBackend(make)) as model:
        ids = range(1, 7)
        for number in range(5):
            await asyncio.gather(*(model.infer(step(id, id, number == 0, number == 4)) for id in ids))
        check_books(model, 30)
    assert all(len(seen[id]) == 1 for id in ids)
    assert set.union(*(seen[id] for id in ids)) == {"echo_0_0", "echo_0_1", "echo_0_2"}


async def test_padding_is_answered_to_no_one() -> None:
    batches: list[list[int]] = []

    def execute(batch: Batch) -> None:
        found = batch.gather()["INPUT0"]
        batches.append(found.ravel().tolist())
        batch.scatter({"OUTPUT0": found})

    async with served(sequences(), execute) as model:
        await asyncio.gather(*(model.infer(step(id, id, start=True)) for id in (1, 2, 3)))
        answer = await model.infer(step(3, 33))
        assert output(answer).tolist() == [[33]]
        check_books(model, 4)
        assert (model.statistics.inference_count, model.statistics.execution_count) == (4, 2)
    assert batches == [[1, 2, 3], [0, 0, 33]]


async def test_a_batch_that_fails_is_not_tried_again() -> None:
    batches = []

    def execute(batch: Batch) -> None:
        batches.append(len(batch.calls))
        raise ValueError("no")

    async with served(sequences(), execute) as model:
        found = await asyncio.gather(*(model.infer(step(id, start=True)) for id in (1, 2)), return_exceptions=True)
        assert [type(each) for each in found] == [EngineError, EngineError]
        check_books(model, 2)
    assert batches == [2]


async def test_a_client_that_leaves_ends_its_waiting_sequence() -> None:
    gate = Gate()
    async with served(sequences("oldest { max_candidate_sequences: 1 }"), gate) as model:
        first = asyncio.create_task(model.infer(step(1, start=True)))
        await until(lambda: len(gate.batches) == 1)
        waiting = [asyncio.create_task(model.infer(step(1, value))) for value in (2, 3)]
        other = asyncio.create_task(model.infer(step(2, 4, start=True, end=True)))
        await until(lambda: model.queued == 3)
        waiting[0].cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in found] == [asyncio.CancelledError, CancelledError]
        gate.open.set()
        await asyncio.gather(first, other)
        with pytest.raises(InvalidRequestError, match="START"):
            await model.infer(step(1))
        check_books(model, 4)
    assert gate.batches == [[1], [4]]


async def test_a_client_that_leaves_while_it_is_served_leaves_the_sequence_alone() -> None:
    gate = Gate()
    async with served(sequences(), gate) as model:
        first = asyncio.create_task(model.infer(step(1, start=True)))
        await until(lambda: len(gate.batches) == 1)
        first.cancel()
        gate.open.set()
        assert output(await model.infer(step(1, 5, end=True))).tolist() == [[5]]


async def test_a_deadline_in_the_backlog() -> None:
    async with served(sequences("oldest { max_candidate_sequences: 1 }")) as model:
        await model.infer(step(1, start=True))
        with pytest.raises(DeadlineExceededError):
            await model.infer(step(2, start=True, deadline=asyncio.get_running_loop().time()))
        check_books(model, 2)


async def test_what_was_accepted_is_answered_when_the_model_stops() -> None:
    async with served(sequences("oldest { max_candidate_sequences: 1 }")) as model:
        await model.infer(step(1, start=True))
        waiting = [
            asyncio.create_task(model.infer(step(2, 2, start=True))),
            asyncio.create_task(model.infer(step(2, 3))),
        ]
        await until(lambda: model.queued == 2)
        await model.stop()
        assert [output(await each).tolist() for each in waiting] == [[[2]], [[3]]]
        with pytest.raises(NotReadyError):
            await model.infer(step(1))


async def test_direct_batches_wait_for_a_delay() -> None:
    delayed = "direct { max_queue_delay_microseconds: 1000 minimum_slot_utilization: 1 }"
    async with served(sequences(delayed)) as model:
        assert output(await model.infer(step(1, 9, start=True))).tolist() == [[9]]


async def test_state_that_the_model_does_not_give_is_an_error() -> None:
    state = 'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] }'
    async with served(sequences(state)) as model:
        with pytest.raises(EngineError, match="the model gave no output 'T'"):
            await model.infer(step(1, start=True))


ITERATIVE = f"""
max_batch_size: 4
input {{ name: "N" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }}
sequence_batching {{ iterative_sequence: true oldest {{ max_candidate_sequences: 8 }} }}
{CPU}
"""
RESCHEDULE = "set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)"
COUNTS = f"""
class TritonPythonModel:
    def initialize(self, args):
        self.rounds = {{}}

    def execute(self, requests):
        found = []
        for r in requests:
            wanted = pb_utils.get_input_tensor_by_name(r, "N").as_numpy()
            id = r.correlation_id()
            self.rounds[id] = self.rounds.get(id, 0) + 1
            if self.rounds[id] < wanted[0, 0]:
                r.{RESCHEDULE}
                found.append(None)
            else:
                size = np.full((1, 1), self.rounds.pop(id) * 100 + len(requests), np.int32)
                found.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", size)]))
        return found
"""


def n(value: int) -> Any:
    return request(N=np.array([[value]], np.int32))


async def test_a_request_with_one_response_is_executed_until_it_has_it(tmp_path: Path) -> None:
    async with loaded(tmp_path, COUNTS, ITERATIVE) as model:
        answers = await asyncio.gather(*(model.infer(n(value)) for value in (3, 1, 3)))
        assert [int(outputs(each)["Y"][0, 0]) for each in answers] == [302, 103, 302]
        assert_books(model, 3)
        assert model.statistics.execution_count == 3


def assert_books(model: ClassicModel, admitted: int) -> None:
    check_books(model, admitted)
    assert model.statistics.fail.count == 0


@pytest.mark.parametrize(
    ("config", "code", "text"),
    [
        (
            ITERATIVE,
            f"requests[0].{RESCHEDULE}; return [pb_utils.InferenceResponse([])]",
            "Expected a None object in the execute function return list for reschduled request, found type",
        ),
        (ITERATIVE, f"requests[0].{RESCHEDULE}; raise ValueError('late')", "message: ValueError: late"),
        (ITERATIVE, "requests[0].set_release_flags(7)", "Unsupported release flags 7."),
        (
            ITERATIVE,
            "requests[0].get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor('Y', np.zeros((1, 1), "
            f"np.int32))])); requests[0].{RESCHEDULE}",
            "",
        ),
        (
            ITERATIVE.replace("iterative_sequence: true", ""),
            f"requests[0].{RESCHEDULE}",
            "it needs sequence_batching { iterative_sequence: true }",
        ),
    ],
)
async def test_requests_that_cannot_be_rescheduled(tmp_path: Path, config: str, code: str, text: str) -> None:
    body = f"class TritonPythonModel:\n    def execute(self, requests):\n        {code}\n"
    async with loaded(tmp_path, body, config) as model:
        asked = n(1)
        asked.correlation_id, asked.sequence_start, asked.sequence_end = 5, True, True
        if text:
            with pytest.raises(EngineError, match=text):
                await model.infer(asked)
        else:
            await model.infer(asked)  # its answer had been sent
        assert model.ready


async def test_each_state_comes_back_as_its_own_input(tmp_path: Path) -> None:
    """Report server#8586: Triton pairs the names in the order of the alphabet, which is another for these outputs."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            [r] = requests
            state = {t.name(): t.as_numpy() for t in r.inputs()}
            return [pb_utils.InferenceResponse([
                pb_utils.Tensor("Y", state["cache"].sum(keepdims=True).reshape(1, 1).astype(np.int32)),
                pb_utils.Tensor("cache_next", state["cache"] + np.float16(1)),
                pb_utils.Tensor("cache_len_next", state["cache_len"] + 10),
            ])]
    """
    states = "".join(
        f"""state {{ input_name: "{name}" output_name: "{name}_next" data_type: TYPE_{kind} dims: [ {size} ]
          initial_state {{ name: "zeros" data_type: TYPE_{kind} dims: [ {size} ] zero_data: true }} }} """
        for name, kind, size in (("cache", "FP16", 3), ("cache_len", "INT64", 1))
    )
    async with loaded(tmp_path, code, ITERATIVE.replace("iterative_sequence: true", states)) as model:
        found = []
        for place in range(3):
            asked = n(1)
            asked.correlation_id, asked.sequence_start = 7, place == 0
            found.append(int(outputs(await model.infer(asked))["Y"][0, 0]))
    assert found == [0, 3, 6]


async def test_a_python_batch_of_sequences_is_not_tried_again(tmp_path: Path) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.calls = 0

        def execute(self, requests):
            self.calls += 1
            raise ValueError(f"call {self.calls} of {len(requests)}")
    """
    config = ITERATIVE.replace("iterative_sequence: true", "")
    async with loaded(tmp_path, code, config) as model:
        made = [n(1), n(2)]
        for id, each in enumerate(made, 1):
            each.correlation_id, each.sequence_start = id, True
        found = await asyncio.gather(*(model.infer(each) for each in made), return_exceptions=True)
    assert [str(each).rpartition(": ")[2] for each in found] == ["call 1 of 2", "call 1 of 2"]
