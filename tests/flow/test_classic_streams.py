"""Decoupled models: responses as they come, from any thread, to readers fast, slow and gone."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from penstock.classic.base import Batch, InferCall
from penstock.classic.batching import responses as streams
from penstock.classic.messages import InferResponse
from penstock.classic.statistics import MAX_RESPONSE_STATISTICS
from penstock.classic.tensors import Tensor
from penstock.engines.errors import CancelledError, DeadlineExceededError, EngineError, NotReadyError, OverloadedError
from support.classic import (
    ECHO,
    FakeAsyncInstance,
    FunctionBackend,
    check_books,
    echo_request,
    load,
    model_config,
    request,
    served,
    until,
)

DECOUPLED = "model_transaction_policy { decoupled: true }"
STRINGS = """
    name: "strings" backend: "test"
    input { name: "INPUT0" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "OUTPUT0" data_type: TYPE_STRING dims: [ 1 ] }
"""


def tensor(value: int) -> Tensor:
    return Tensor("OUTPUT0", "INT32", np.array([[value]], np.int32))


def repeat(batch: Batch) -> None:
    """The numbers below the request's, then an empty final response."""
    for call in batch.calls:
        count = int(call.request.inputs["INPUT0"].array[0, 0])
        for value in range(count):
            call.send(InferResponse([tensor(value)], final=False))
        call.send(InferResponse(None))


def values(responses: list[InferResponse]) -> list[int]:
    return [int(response.outputs[0].array[0, 0]) for response in responses if response.outputs]


async def test_responses_come_in_order_and_end_with_one_final() -> None:
    async with served(model_config(ECHO, DECOUPLED, "dynamic_batching {}"), repeat) as model:
        many = [model.stream(echo_request(n)) for n in (3, 0, 500)]
        for stream, count in zip(many, (3, 0, 500), strict=True):
            responses = [response async for response in stream]
            assert values(responses) == list(range(count))
            assert [response.final for response in responses] == [False] * count + [True]
        check_books(model, 3)
        await until(lambda: model.statistics.execution_count == 1)  # the backend returns after its last response
        by_number = model.statistics.responses
        assert (by_number[0].success.count, by_number[0].empty_response.count) == (2, 1)
        assert (by_number[3].success.count, by_number[3].empty_response.count) == (1, 1)
        assert by_number[500].empty_response.count == 1


async def test_counters_of_responses_are_bounded() -> None:
    async with served(model_config(ECHO, DECOUPLED), repeat) as model:
        assert len(values([response async for response in model.stream(echo_request(2000))])) == 2000
        by_number = model.statistics.responses
        assert len(by_number) == MAX_RESPONSE_STATISTICS
        assert by_number[MAX_RESPONSE_STATISTICS - 1].success.count == 2001 - MAX_RESPONSE_STATISTICS


async def test_responses_may_come_from_other_threads_after_execute_has_ended() -> None:
    def later(batch: Batch) -> None:
        for call in batch.calls:
            threading.Thread(target=repeat, args=(OneCall(call),)).start()

    class OneCall:
        def __init__(self, call: InferCall) -> None:
            self.calls = [call]

    async with served(model_config(ECHO, DECOUPLED), later) as model:
        many = [model.stream(echo_request(100)) for _ in range(8)]
        for stream in many:
            assert values([response async for response in stream]) == list(range(100))
        check_books(model, 8)


async def test_what_comes_after_the_final_response_is_dropped() -> None:
    def chatty(batch: Batch) -> None:
        call = batch.calls[0]
        call.send(InferResponse([tensor(1)]))
        call.send(InferResponse([tensor(2)]))
        call.fail(EngineError("too late"))

    async with served(model_config(ECHO, DECOUPLED), chatty) as model:
        responses = [response async for response in model.stream(echo_request(0))]
        assert values(responses) == [1]
        assert responses[-1].final
        check_books(model, 1)


async def test_an_error_ends_the_stream_and_is_not_executed_again() -> None:
    runs: list[int] = []

    def half(batch: Batch) -> None:
        runs.append(len(batch.calls))
        batch.calls[0].send(InferResponse([tensor(1)], final=False))
        raise RuntimeError("broken")

    async with served(model_config(ECHO, DECOUPLED, "dynamic_batching {}"), half) as model:
        two = [model.stream(echo_request(n)) for n in range(2)]
        for stream in two:
            responses = [response async for response in stream]
            assert values(responses) == [1]
            assert isinstance(responses[-1].error, EngineError)
            assert "broken" in responses[-1].error.message
        # The first had got a response: it failed at once. The second was tried again alone.
        assert runs == [2, 1]
        check_books(model, 2)
        assert model.statistics.failures == {"BACKEND": 2}


async def test_a_stream_that_is_closed_cancels_its_request() -> None:
    gone = threading.Event()

    def endless(batch: Batch) -> None:
        call = batch.calls[0]
        while not call.cancelled:
            call.send(InferResponse([tensor(1)], final=False))
        gone.set()

    async with served(model_config(ECHO, DECOUPLED), endless) as model:
        stream = model.stream(echo_request(0))
        await stream.__anext__()
        stream.close()
        stream.close()
        assert [response async for response in stream] == []
        await until(gone.is_set)
        check_books(model, 1)
        assert model.statistics.failures == {"CANCELED": 1}


async def test_a_model_that_is_asked_to_stop_sends_what_it_likes_until_its_end() -> None:
    def stubborn(batch: Batch) -> None:
        call = batch.calls[0]
        call.send(InferResponse([tensor(1)], final=False))
        while not call.cancelled:
            time.sleep(0.001)
        call.send(InferResponse([tensor(2)], final=False))
        call.send(InferResponse(None))

    async with served(model_config(ECHO, DECOUPLED), stubborn) as model:
        stream, waiting = model.stream(echo_request(0)), model.stream(echo_request(1))
        await anext(stream)
        assert isinstance(waiting, streams.CallStream)
        assert waiting.cancel()
        [refused] = [response async for response in waiting]
        assert isinstance(refused.error, CancelledError)
        assert isinstance(stream, streams.CallStream)
        assert stream.cancel()
        assert stream.cancel()
        assert [response.outputs is not None async for response in stream] == [True, False]
        check_books(model, 2)
        assert model.statistics.failures == {"CANCELED": 1}


async def test_a_stream_that_is_closed_in_the_queue_is_never_executed() -> None:
    started = threading.Event()
    release = threading.Event()
    seen: list[int] = []

    def slow(batch: Batch) -> None:
        seen.append(int(batch.gather()["INPUT0"][0, 0]))
        started.set()
        release.wait(30)
        batch.calls[0].send(InferResponse(None))

    async with served(model_config(ECHO, DECOUPLED), slow) as model:
        first = model.stream(echo_request(1))
        await until(started.is_set)
        model.stream(echo_request(2)).close()
        assert model.queued == 0
        release.set()
        assert [response.final async for response in first] == [True]
        assert seen == [1]
        check_books(model, 2)


async def test_a_reader_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_RESPONSES", 50)
    stopped = threading.Event()

    def endless(batch: Batch) -> None:
        call = batch.calls[0]
        while not call.cancelled:
            call.send(InferResponse([tensor(1)], final=False))
        stopped.set()

    async with served(model_config(ECHO, DECOUPLED), endless) as model:
        stream = model.stream(echo_request(0))
        await until(stopped.is_set)
        responses = [response async for response in stream]
        # What was not read is not kept.
        assert len(responses) == 1
        assert isinstance(responses[0].error, OverloadedError)
        assert responses[0].final
        check_books(model, 1)


async def test_a_model_that_sends_without_a_pause_does_not_lose_a_reader_that_reads() -> None:
    count = 3 * streams.MAX_UNREAD_RESPONSES

    async with served(model_config(ECHO, DECOUPLED), repeat) as model:
        stream = model.stream(echo_request(count))
        seen = 0
        async for response in stream:
            assert response.error is None
            seen += 1
        assert seen == count + 1
        check_books(model, 1)


async def test_unread_bytes_are_bounded_but_one_response_may_have_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_BYTES", 1000)

    def large(batch: Batch) -> None:
        for call in batch.calls:
            for _ in range(int(call.request.inputs["INPUT0"].array[0, 0])):
                call.send(InferResponse([Tensor("OUTPUT0", "INT32", np.zeros((1, 500), np.int32))], final=False))
            call.send(InferResponse(None))

    async with served(model_config(ECHO, DECOUPLED), large) as model:
        alone = model.stream(echo_request(1))
        assert (await alone.__anext__()).error is None
        several = model.stream(echo_request(3))
        await until(lambda: model.statistics.fail.count == 1)
        assert [type(response.error) async for response in several] == [OverloadedError]


async def test_strings_count_with_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of strings is an array of pointers: what it holds may be a thousand times larger."""
    monkeypatch.setattr(streams, "MAX_UNREAD_BYTES", 1000)

    def long_texts(batch: Batch) -> None:
        for call in batch.calls:
            for _ in range(3):
                text = np.array([b"x" * 900], np.object_)
                call.send(InferResponse([Tensor("OUTPUT0", "BYTES", text)], final=False))
            call.send(InferResponse(None))

    given = np.array([b"go"], np.object_)
    async with served(model_config(STRINGS, DECOUPLED), long_texts) as model:
        stream = model.stream(request(INPUT0=given))
        await until(lambda: model.statistics.fail.count == 1)
        assert [type(response.error) async for response in stream] == [OverloadedError]


async def test_models_that_are_not_decoupled_can_be_streamed_too() -> None:
    def late_final(batch: Batch) -> None:
        for call in batch.calls:
            call.send(InferResponse([tensor(5)], final=False))
            call.send(InferResponse(None))

    for execute in (None, late_final):
        async with served(model_config(ECHO), *([execute] if execute else [])) as model:
            responses = [response async for response in model.stream(echo_request(5))]
            assert values(responses) == [5]
            assert [response.final for response in responses] == [True]
            assert values([await model.infer(echo_request(5))]) == [5]


async def test_a_deadline_ends_a_stream_that_has_begun() -> None:
    def endless(batch: Batch) -> None:
        call = batch.calls[0]
        call.send(InferResponse([tensor(1)], final=False))
        while not call.cancelled:
            time.sleep(0.001)

    async with served(model_config(ECHO, DECOUPLED), endless) as model:
        stream = model.stream(echo_request(0, deadline=time.monotonic() + 0.05))
        responses = [response async for response in stream]
        assert values(responses) == [1]
        assert isinstance(responses[-1].error, DeadlineExceededError)


async def test_streams_of_two_instances_keep_the_order_of_their_requests() -> None:
    release = threading.Event()

    def in_turn(batch: Batch) -> None:
        call = batch.calls[0]
        if call.request.inputs["INPUT0"].array[0, 0] == 0:
            release.wait(30)
        call.send(InferResponse([tensor(1)], final=False))
        call.send(InferResponse([tensor(2)]))

    config = model_config(
        ECHO,
        DECOUPLED,
        "dynamic_batching { preserve_ordering: true preferred_batch_size: [ 1 ] }",
        "instance_group { count: 2 kind: KIND_CPU }",
    )
    async with served(config, in_turn) as model:
        first, second = model.stream(echo_request(0)), model.stream(echo_request(1))
        await until(lambda: model.statistics.success.count == 1)
        early = asyncio.ensure_future(second.__anext__())
        await asyncio.sleep(0.01)
        assert not early.done()
        release.set()
        assert values([response async for response in first]) == [1, 2]
        assert values([await early, *[response async for response in second]]) == [1, 2]


async def test_instances_on_the_loop_are_driven_and_get_no_batches_while_they_restart() -> None:
    seen: list[int] = []

    async def execute(batch: Batch) -> None:
        seen.append(len(batch.calls))
        await asyncio.sleep(0)
        repeat(batch)

    instance = FakeAsyncInstance(execute)
    backend = FunctionBackend(lambda context: instance)
    async with served(model_config(ECHO, DECOUPLED, "dynamic_batching {}"), backend) as model:
        assert model.ready
        assert values([response async for response in model.stream(echo_request(3))]) == [0, 1, 2]
        instance.become(up=False)
        assert not model.ready
        waiting = [model.stream(echo_request(1)) for _ in range(4)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert seen == [1]
        instance.become(up=True)
        for stream in waiting:
            assert values([response async for response in stream]) == [0]
        assert seen == [1, 4]
        assert model.ready
    assert instance.unloaded


async def test_a_lost_instance_fails_what_waits_for_it() -> None:
    async def execute(batch: Batch) -> None:
        repeat(batch)

    instance = FakeAsyncInstance(execute)
    async with served(model_config(ECHO, DECOUPLED), FunctionBackend(lambda context: instance)) as model:
        instance.become(up=False)
        stream = model.stream(echo_request(1))
        await asyncio.sleep(0)
        instance.become(up=False, lost=NotReadyError("restarted too often"))
        [response] = [response async for response in stream]
        assert isinstance(response.error, NotReadyError)
        with pytest.raises(NotReadyError, match="restarted too often"):
            model.stream(echo_request(1))
        check_books(model, 1)


async def test_a_thread_waits_for_a_reader_that_paces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_RESPONSES", 40)
    monkeypatch.setattr(streams, "AHEAD_RESPONSES", 10)
    async with served(model_config(ECHO, DECOUPLED), repeat) as model:
        stream = model.stream(echo_request(500))
        assert isinstance(stream, streams.CallStream)
        stream.pace()
        await until(lambda: stream._room is not None)
        assert values([response async for response in stream]) == [*range(500)]
        check_books(model, 1)


async def test_a_model_goes_on_when_its_reader_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might wait for itself: an ensemble whose next step is the same model."""
    monkeypatch.setattr(streams, "MAX_UNREAD_RESPONSES", 40)
    monkeypatch.setattr(streams, "AHEAD_RESPONSES", 10)
    monkeypatch.setattr(streams, "_PATIENCE", 0.01)
    async with served(model_config(ECHO, DECOUPLED), repeat) as model:
        stream = model.stream(echo_request(500))
        assert isinstance(stream, streams.CallStream)
        stream.pace()
        await until(lambda: model.statistics.pending == 0 and stream._ended)
        [response] = [response async for response in stream]
        assert isinstance(response.error, OverloadedError)


async def test_a_stop_that_is_given_up_unloads_an_instance_that_hangs() -> None:
    async def hang(batch: Batch) -> None:
        await asyncio.Event().wait()

    instance = FakeAsyncInstance(hang)
    model = await load(model_config(ECHO), FunctionBackend(lambda context: instance))
    call = asyncio.ensure_future(model.infer(echo_request(1)))
    await until(lambda: model.statistics.pending == 0 and model.queued == 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(model.stop(), 0.01)
    with pytest.raises(NotReadyError):
        await call
    await until(lambda: instance.unloaded)
    check_books(model, 1)
