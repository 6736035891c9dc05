"""What backends see of a batch: gather, scatter, and which answers leave."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.classic.batching.batch import ExecBatch, QueuedCall, UnaryCall
from penstock.classic.batching.responses import ResponseOrder
from penstock.classic.messages import InferResponse
from penstock.classic.signature import ModelSignature
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineDeadError, EngineError
from support.classic import ECHO, model_config, output, request

TEXT = """
    name: "text" max_batch_size: 8
    input { name: "IN" data_type: TYPE_STRING dims: [ 2 ] reshape { shape: [ 1, 2 ] } }
    output { name: "OUT" data_type: TYPE_STRING dims: [ 2 ] reshape { shape: [ 1, 2 ] } }
"""


async def made(*rows: int, config: str = ECHO, outputs: tuple[str, ...] = ()) -> ExecBatch:
    loop = asyncio.get_running_loop()
    signature = ModelSignature(model_config(config))
    calls: list[QueuedCall] = []
    for index, count in enumerate(rows):
        inputs = request(INPUT0=np.full((count, 1), index, np.int32), outputs=outputs)
        calls.append(UnaryCall(inputs, count, loop.create_future()))
    return ExecBatch(calls, signature, None)


async def test_gather_copies_nothing_for_one_call_and_once_for_several() -> None:
    one = await made(2)
    assert one.gather()["INPUT0"] is one.calls[0].request.inputs["INPUT0"].array
    several = await made(1, 3, 2)
    assert several.gather()["INPUT0"].ravel().tolist() == [0, 1, 1, 1, 2, 2]
    assert several.size == 6


async def test_scatter_gives_views_of_what_the_model_gave() -> None:
    batch = await made(1, 3, 2)
    given = batch.gather()["INPUT0"] * 10
    batch.scatter({"OUTPUT0": given, "UNKNOWN": given})
    arrays = [output(response) for _, response in batch.answers]
    assert [array.ravel().tolist() for array in arrays] == [[0], [10] * 3, [20] * 2]
    assert all(np.shares_memory(array, given) and array.flags.c_contiguous for array in arrays)
    assert batch.close(None) == []


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({}, "no output 'OUTPUT0'"),
        ({"OUTPUT0": np.zeros((5, 1), np.int32)}, "for a batch of 6 inferences"),
        ({"OUTPUT0": np.zeros((), np.int32)}, "for a batch of 6 inferences"),
        ({"OUTPUT0": np.zeros((6, 1), np.int64)}, "int64, the configuration says INT32"),
    ],
)
async def test_outputs_that_do_not_fit_are_refused(outputs: dict[str, np.ndarray], text: str) -> None:
    batch = await made(1, 3, 2)
    with pytest.raises(ValueError, match=text):
        batch.scatter(outputs)
    assert batch.answers == []


@pytest.mark.parametrize("asked", [(), ("OUTPUT0",)])
async def test_an_answer_with_none_of_the_configured_outputs_is_an_error(asked: tuple[str, ...]) -> None:
    batch = await made(1, outputs=asked)
    unknown = Tensor("NOPE", "INT32", np.zeros((1, 1), np.int32))
    batch.send(batch.calls[0], InferResponse([unknown]))
    [(_, response)] = batch.answers
    assert response.outputs is None
    assert "answered with 'NOPE'; the outputs of its configuration are 'OUTPUT0'" in str(response.error)


async def test_outputs_that_the_configuration_does_not_know_are_left_out_beside_others() -> None:
    batch = await made(1)
    rows = np.zeros((1, 1), np.int32)
    batch.send(batch.calls[0], InferResponse([Tensor("NOPE", "INT32", rows), Tensor("OUTPUT0", "INT32", rows)]))
    [(_, response)] = batch.answers
    assert [tensor.name for tensor in response.outputs or ()] == ["OUTPUT0"]


async def test_outputs_become_contiguous_and_text_becomes_bytes() -> None:
    batch = await made(2, 1)
    batch.scatter({"OUTPUT0": np.asfortranarray(np.zeros((3, 4), np.int32))})
    assert all(output(response).flags.c_contiguous for _, response in batch.answers)

    signature = ModelSignature(model_config(TEXT))
    future = asyncio.get_running_loop().create_future()
    text = ExecBatch([UnaryCall(request(IN=np.array([[b"a", b"b"]], object)), 1, future)], signature, None)
    taken = text.gather()["IN"]
    assert taken.shape == (1, 1, 2)
    text.scatter({"OUT": np.array([[["é", "b"]]])})
    [(_, response)] = text.answers
    assert output(response, "OUT").tolist() == [["é".encode(), b"b"]]
    assert output(response, "OUT").dtype == np.object_


async def test_an_error_is_tried_again_by_those_that_got_nothing() -> None:
    batch = await made(1, 1, 1, 1)
    first, second, third, fourth = batch.calls
    first.send(InferResponse([]))
    second.send(InferResponse([], final=False))
    assert isinstance(fourth, QueuedCall)
    fourth.cancelled = True
    again = batch.close(EngineError("broken"))
    assert again == [third]
    assert [(call, response.error and response.error.message) for call, response in batch.answers] == [
        (first, None),
        (second, "broken"),
        (fourth, "broken"),
    ]
    [single] = batch.split(again)
    assert single.close(EngineError("broken")) == []
    assert [call for call, _ in single.answers] == [third]


async def test_a_dead_engine_is_not_asked_again() -> None:
    batch = await made(1, 1)
    error = EngineDeadError("gone")
    assert batch.close(error) == []
    errors = [response.error for _, response in batch.answers]
    assert [type(found) for found in errors] == [EngineDeadError] * 2
    # One exception that several callers raise would grow with each.
    assert errors[0] is not errors[1]


async def test_several_responses_of_a_model_that_is_not_decoupled_are_one() -> None:
    batch = await made(1, 1, 1)
    tensor = Tensor("OUTPUT0", "INT32", np.zeros((1, 1), np.int32))
    for call in batch.calls:
        call.send(InferResponse([tensor], final=False))
    batch.calls[0].send(InferResponse(None))
    batch.calls[1].send(InferResponse([tensor]))
    batch.calls[2].fail(EngineError("late"))
    batch.calls[2].send(InferResponse(None))
    assert [(response.outputs is not None, response.final) for _, response in batch.answers[:1]] == [(True, True)]
    errors = [response.error.message for _, response in batch.answers[1:] if response.error is not None]
    assert errors == ["model 'echo' gave several responses, and is not decoupled", "late"]


async def test_what_calls_send_is_what_was_asked_for_in_the_callers_shape() -> None:
    tensor = "data_type: TYPE_INT32 dims: [ 4 ] reshape { shape: [ 2, 2 ] }"
    config = f"""name: "r" max_batch_size: 2 input {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }}
    output {{ name: "A" {tensor} }} output {{ name: "B" {tensor} }}"""
    batch = await made(1, 1, config=config, outputs=("B", "A"))
    array = np.arange(4, dtype=np.int32).reshape(1, 2, 2)
    batch.calls[0].send(InferResponse([Tensor(name, "INT32", array) for name in ("A", "B", "C")]))
    batch.calls[1].send(InferResponse([Tensor("A", "INT32", array)]))
    sent = [[(tensor.name, tensor.array.shape) for tensor in response.outputs or ()] for _, response in batch.answers]
    assert sent == [[("B", (1, 4)), ("A", (1, 4))], [("A", (1, 4))]]
    scattered = await made(1, 1, config=config)
    scattered.scatter(dict.fromkeys("AB", np.zeros((2, 2, 2), np.int32)))
    assert [output(response, "B").shape for _, response in scattered.answers] == [(1, 4)] * 2


async def test_times_are_in_order_whatever_a_model_calls() -> None:
    batch = await made(1)
    batch.start_ns = 1
    batch.calls[0].send(InferResponse([]))
    batch.gather()
    batch.close(None)
    assert all(spent >= 0 for spent in batch.durations())
    silent = await made(1)
    silent.start_ns = 1
    silent.close(None)
    assert silent.durations()[0] == 0


async def test_order_of_responses_is_that_of_execution() -> None:
    out: list[tuple[int, bool]] = []

    class Recorder(UnaryCall):
        def deliver(self, response: InferResponse) -> None:
            out.append((self.size, response.final))

    loop = asyncio.get_running_loop()
    calls = [Recorder(request(), size, loop.create_future()) for size in (1, 2, 3, 4)]
    order = ResponseOrder()
    for call in calls:
        order.enter(call)
    order.deliver(calls[1], InferResponse(None, final=False))
    order.deliver(calls[3], InferResponse(None))
    assert out == []
    order.deliver(calls[0], InferResponse(None, final=False))
    assert out == [(1, False)]
    order.leave(calls[0])
    assert out == [(1, False), (2, False)]
    order.leave(calls[2])
    order.deliver(calls[1], InferResponse(None))
    assert out == [(1, False), (2, False), (2, True), (4, True)]
    order.deliver(calls[1], InferResponse(None))
    order.leave(calls[1])
    assert len(out) == 4
