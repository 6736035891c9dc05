"""Requests through a model: batches, failures in them, order, priorities, time limits, cancellation."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref

import numpy as np
import pytest

from penstock.classic.base import Batch
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Array, Tensor
from penstock.engines.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    QueueTimeoutError,
    UnsupportedError,
)
from support.classic import (
    ADD_SUB,
    ECHO,
    FunctionBackend,
    Gate,
    check_books,
    echo,
    echo_request,
    model_config,
    output,
    request,
    served,
    until,
)


def add_sub(batch: Batch) -> None:
    inputs = batch.gather()
    a, b = inputs["INPUT0"], inputs["INPUT1"]
    if np.any(a == 13):
        raise RuntimeError("thirteen")
    batch.scatter({"OUTPUT0": a + b, "OUTPUT1": a - b})


def add_sub_request(value: int, outputs: tuple[str, ...] = ()) -> InferRequest:
    rows = np.full((1, 4), value, np.float32)
    return request(INPUT0=rows, INPUT1=np.ones((1, 4), np.float32), outputs=outputs)


async def test_one_raising_request_in_a_batch_of_32_leaves_31_right_answers() -> None:
    async with served(model_config(ADD_SUB, "dynamic_batching {}"), add_sub) as model:
        results = await asyncio.gather(*(model.infer(add_sub_request(n)) for n in range(32)), return_exceptions=True)
        assert isinstance(results[13], EngineError)
        assert "thirteen" in results[13].message
        for n, result in enumerate(results):
            if n != 13:
                assert output(result).tolist() == [[n + 1] * 4]
                assert output(result, "OUTPUT1").tolist() == [[n - 1] * 4]
        check_books(model, 32)
        assert model.statistics.failures == {"BACKEND": 1}
        # The batch of 32 failed, its requests were executed one by one.
        assert model.statistics.execution_count == 31


async def test_requested_outputs_come_alone_and_in_the_order_asked_for() -> None:
    async with served(model_config(ADD_SUB, "dynamic_batching {}"), add_sub) as model:
        wanted = [("OUTPUT1",), (), ("OUTPUT1", "OUTPUT0")]
        results = await asyncio.gather(*(model.infer(add_sub_request(1, names)) for names in wanted))
        names = [[tensor.name for tensor in result.outputs or ()] for result in results]
        assert names == [["OUTPUT1"], ["OUTPUT0", "OUTPUT1"], ["OUTPUT1", "OUTPUT0"]]
        assert model.statistics.execution_count == 1


async def test_a_batch_counts_inferences_not_requests() -> None:
    gate = Gate()
    async with served(model_config(ECHO, "dynamic_batching {}"), gate) as model:
        first = asyncio.ensure_future(model.infer(echo_request(0)))
        await until(lambda: len(gate.batches) == 1)
        triples = [asyncio.ensure_future(model.infer(request(INPUT0=[[n]] * 3))) for n in range(1, 5)]
        await until(lambda: model.queued == 4)
        gate.open.set()
        results = await asyncio.gather(first, *triples)
        assert [output(result).ravel().tolist() for result in results] == [[0], *([n] * 3 for n in range(1, 5))]
        assert gate.batches == [[0], [1, 2], [3, 4]]
        assert {size: found.compute_infer.count for size, found in model.statistics.batches.items()} == {1: 1, 6: 2}
        assert model.statistics.inference_count == 13


async def test_without_dynamic_batching_every_request_goes_alone_and_in_order() -> None:
    gate = Gate()
    gate.open.set()
    async with served(model_config(ECHO), gate) as model:
        await asyncio.gather(*(model.infer(echo_request(n)) for n in range(10)))
        assert gate.batches == [[n] for n in range(10)]


async def test_a_batch_waits_for_the_preferred_size_and_no_longer_than_the_delay() -> None:
    gate = Gate()
    gate.open.set()
    delay = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 60000000 }"
    async with served(model_config(ECHO, delay), gate) as model:
        waiting = [asyncio.ensure_future(model.infer(echo_request(n))) for n in range(3)]
        await until(lambda: model.queued == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert gate.batches == []
        await model.infer(echo_request(3))
        await asyncio.gather(*waiting)
        assert gate.batches == [[0, 1, 2, 3]]
    for microseconds in (200, 20_000):
        gate.batches.clear()
        short = f"dynamic_batching {{ preferred_batch_size: [ 4 ] max_queue_delay_microseconds: {microseconds} }}"
        async with served(model_config(ECHO, short), gate) as model:
            started = time.monotonic()
            await asyncio.gather(*(model.infer(echo_request(n)) for n in range(3)))
            assert time.monotonic() - started >= microseconds / 1e6
            assert gate.batches == [[0, 1, 2]]


async def test_higher_priorities_go_first() -> None:
    gate = Gate()
    levels = "dynamic_batching { priority_levels: 3 default_priority_level: 2 preferred_batch_size: [ 1 ] }"
    async with served(model_config(ECHO, levels), gate) as model:
        calls = [asyncio.ensure_future(model.infer(echo_request(0)))]
        await until(lambda: len(gate.batches) == 1)
        # 0 and 9 are not levels of the model: the default.
        calls += [
            asyncio.ensure_future(model.infer(echo_request(n, priority=priority)))
            for n, priority in enumerate((3, 0, 1, 9, 2, 1), start=1)
        ]
        await until(lambda: model.queued == 6)
        gate.open.set()
        await asyncio.gather(*calls)
        assert gate.batches == [[0], [3], [6], [2], [4], [5], [1]]


async def test_a_full_queue_refuses_and_a_request_whose_time_is_over_is_rejected() -> None:
    gate = Gate()
    policy = """dynamic_batching { default_queue_policy {
        max_queue_size: 2 default_timeout_microseconds: 400000 allow_timeout_override: true } }"""
    async with served(model_config(ECHO, policy), gate) as model:
        running = asyncio.ensure_future(model.infer(echo_request(0)))
        await until(lambda: len(gate.batches) == 1)
        waiting = [asyncio.ensure_future(model.infer(echo_request(n, timeout_us=n * 200_000))) for n in (1, 2)]
        await asyncio.sleep(0)
        assert model.queued == 2
        with pytest.raises(QueueFullError, match=r"^\[request id: 7\] Exceeds maximum queue size$"):
            await model.infer(echo_request(3, id="7"))
        for call in waiting:
            with pytest.raises(QueueTimeoutError, match=r"^Request timeout expired$"):
                await call
        gate.open.set()
        assert output(await running).tolist() == [[0]]
        check_books(model, 4)
        assert model.statistics.failures == {"REJECTED": 3}


async def test_deadlines_end_waiting_and_running_requests() -> None:
    gate = Gate()
    async with served(model_config(ECHO, "dynamic_batching {}"), gate) as model:
        running = asyncio.ensure_future(model.infer(echo_request(0, deadline=time.monotonic() + 0.05)))
        await until(lambda: len(gate.batches) == 1)
        with pytest.raises(DeadlineExceededError):
            await model.infer(echo_request(1, deadline=time.monotonic() + 0.01))
        with pytest.raises(DeadlineExceededError):
            await model.infer(echo_request(2, deadline=time.monotonic() - 1))
        with pytest.raises(DeadlineExceededError):
            await running
        gate.open.set()
    check_books(model, 3)
    assert gate.batches == [[0]]
    assert model.statistics.failures == {"CANCELED": 3}


async def test_ten_thousand_cancels_at_random_leave_nothing_behind() -> None:
    rng = random.Random(5)
    config = model_config(ECHO, "dynamic_batching { default_queue_policy { default_timeout_microseconds: 60000000 } }")
    outcomes = {"admitted": 0, "answered": 0, "cancelled": 0}

    async with served(config) as model:

        async def infer(n: int) -> InferResponse:
            outcomes["admitted"] += 1
            return await model.infer(echo_request(n))

        async def caller(n: int) -> None:
            call = asyncio.ensure_future(infer(n))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.9:
                call.cancel()
            try:
                assert output(await call).tolist() == [[n]]
                outcomes["answered"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1

        for start in range(0, 10_000, 500):
            await asyncio.gather(*(caller(n) for n in range(start, start + 500)))
        await until(lambda: not model.queued)
    assert outcomes["answered"] + outcomes["cancelled"] == 10_000
    assert min(outcomes.values()) > 500
    # Some were cancelled before they started, some in the moment of their answer.
    check_books(model, outcomes["admitted"])
    assert outcomes["answered"] <= model.statistics.success.count <= 10_000
    assert set(model.statistics.failures) == {"CANCELED"}
    # Neither the queue nor its clock of expiries keeps what has left.
    assert list(model._batcher.queue) == []
    assert model._batcher.queue._expiries == []
    assert model._running == set()


async def test_a_cancelled_request_is_told_to_the_model_and_its_neighbours_are_answered() -> None:
    seen: list[list[bool]] = []
    gate = Gate(lambda batch: (seen.append([call.cancelled for call in batch.calls]), echo(batch))[0])
    async with served(model_config(ECHO, "dynamic_batching {}"), gate) as model:
        calls = [asyncio.ensure_future(model.infer(echo_request(n))) for n in range(3)]
        await until(lambda: len(gate.batches) == 1)
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        gate.open.set()
        assert [output(await call).tolist() for call in (calls[0], calls[2])] == [[[0]], [[2]]]
        assert seen == [[False, True, False]]
        check_books(model, 3)


async def test_a_model_can_end_a_request_as_cancelled() -> None:
    def cancel(batch: Batch) -> None:
        batch.calls[0].fail(CancelledError("given up"))

    async with served(model_config(ECHO), cancel) as model:
        with pytest.raises(CancelledError, match="given up"):
            await model.infer(echo_request(1))
        assert model.statistics.failures == {"CANCELED": 1}


@pytest.mark.parametrize("preserve", [True, False])
async def test_preserve_ordering_holds_answers_back_across_instances(preserve: bool) -> None:
    gates = {"echo_0_0": Gate(), "echo_0_1": Gate()}
    config = model_config(
        ECHO,
        f"dynamic_batching {{ preserve_ordering: {str(preserve).lower()} preferred_batch_size: [ 1 ] }}",
        "instance_group { count: 2 kind: KIND_CPU }",
    )
    order: list[int] = []

    async def caller(n: int) -> None:
        await model.infer(echo_request(n))
        order.append(n)

    async with served(config, FunctionBackend(lambda context: gates[context.name])) as model:
        calls = [asyncio.ensure_future(caller(n)) for n in range(2)]
        # Both instances are at work at the same time, on one request each.
        await until(lambda: all(len(gate.batches) == 1 for gate in gates.values()))
        second = next(gate for gate in gates.values() if gate.batches == [[1]])
        second.open.set()
        await until(lambda: model.statistics.success.count == 1)
        await asyncio.sleep(0)
        assert order == ([] if preserve else [1])
        for gate in gates.values():
            gate.open.set()
        await asyncio.gather(*calls)
        assert order == ([0, 1] if preserve else [1, 0])


async def test_a_cancelled_request_does_not_hold_back_those_behind_it() -> None:
    gates = {"echo_0_0": Gate(), "echo_0_1": Gate()}
    config = model_config(
        ECHO,
        "dynamic_batching { preserve_ordering: true preferred_batch_size: [ 1 ] }",
        "instance_group { count: 2 kind: KIND_CPU }",
    )
    async with served(config, FunctionBackend(lambda context: gates[context.name])) as model:
        calls = [asyncio.ensure_future(model.infer(echo_request(n))) for n in range(2)]
        await until(lambda: all(len(gate.batches) == 1 for gate in gates.values()))
        next(gate for gate in gates.values() if gate.batches == [[1]]).open.set()
        await until(lambda: model.statistics.success.count == 1)
        assert not calls[1].done()
        calls[0].cancel()
        assert output(await calls[1]).tolist() == [[1]]
        for gate in gates.values():
            gate.open.set()


async def test_stop_lets_end_what_was_accepted_and_refuses_the_rest() -> None:
    gate = Gate()
    backend = FunctionBackend(lambda context: gate)
    async with served(model_config(ECHO), backend) as model:
        calls = [asyncio.ensure_future(model.infer(echo_request(n))) for n in range(3)]
        await until(lambda: len(gate.batches) == 1)
        stopping = asyncio.ensure_future(model.stop())
        await asyncio.sleep(0)
        assert not model.ready
        with pytest.raises(NotReadyError):
            await model.infer(echo_request(9))
        assert not stopping.done()
        gate.open.set()
        assert [output(await call).tolist() for call in calls] == [[[0]], [[1]], [[2]]]
        await stopping
    assert backend.unloaded == ["echo_0_0", "model"]
    check_books(model, 3)


async def test_a_stop_that_is_given_up_ends_what_still_runs() -> None:
    gate = Gate()
    model_stopped = FunctionBackend(lambda context: gate)
    async with served(model_config(ECHO), model_stopped) as model:
        calls = [asyncio.ensure_future(model.infer(echo_request(n))) for n in range(3)]
        await until(lambda: len(gate.batches) == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(model.stop(), 0.01)
        for call in calls:
            with pytest.raises(NotReadyError):
                await call
        gate.open.set()
        await until(lambda: model_stopped.unloaded == ["echo_0_0"])
    check_books(model, 3)
    assert gate.batches == [[0]]


async def test_wrong_requests_and_decoupled_models_are_refused_before_the_queue() -> None:
    async with served(model_config(ECHO)) as model:
        with pytest.raises(InvalidRequestError, match="expected 1 inputs but got 0 inputs"):
            await model.infer(request())
        check_books(model, 0)
    async with served(model_config(ECHO, "model_transaction_policy { decoupled: true }")) as model:
        with pytest.raises(UnsupportedError):
            await model.infer(echo_request(1))


async def test_a_model_that_gives_nothing_or_too_much_fails_its_request() -> None:
    async with served(model_config(ECHO), lambda batch: None) as model:
        with pytest.raises(EngineError, match="gave no response"):
            await model.infer(echo_request(1))
    async with served(model_config(ECHO), lambda batch: batch.scatter({})) as model:
        with pytest.raises(EngineError, match="no output 'OUTPUT0'"):
            await model.infer(echo_request(1))


async def test_a_model_that_asks_its_thread_to_exit_does_not_lose_it() -> None:
    def leave(batch: Batch) -> None:
        raise SystemExit(3)

    async with served(model_config(ECHO), leave) as model:
        for _ in range(2):
            with pytest.raises(EngineError):
                await model.infer(echo_request(1))


class Recorded:
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def mark(self, event: str, ns: int) -> None:
        self.events.append((event, ns))


async def test_traces_and_statistics_tell_where_the_time_went() -> None:
    def work(batch: Batch) -> None:
        inputs = batch.gather()
        time.sleep(0.02)
        batch.scatter({"OUTPUT0": inputs["INPUT0"]})

    trace = Recorded()
    async with served(model_config(ECHO), work) as model:
        await asyncio.gather(model.infer(echo_request(1)), model.infer(echo_request(2, trace=trace)))
        names = [event for event, _ in trace.events]
        assert names == ["QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
        times = [ns for _, ns in trace.events]
        assert times == sorted(times)
        found = model.statistics
        parts = found.queue.ns + found.compute_input.ns + found.compute_infer.ns + found.compute_output.ns
        assert found.compute_infer.ns >= 2 * 20_000_000
        # The second waited for the first.
        assert found.queue.ns >= 20_000_000
        assert parts <= found.success.ns
        assert (found.success.count, found.queue.count, found.compute_infer.count) == (2, 2, 2)
        assert found.last_inference_ms > 0


async def test_answers_are_given_free_without_a_garbage_collection() -> None:
    """Tensors may be views of memory that has to go back to its owner soon."""
    made: list[weakref.ref[Array]] = []

    def execute(batch: Batch) -> None:
        for call in batch.calls:
            array = np.zeros((1, 4), np.float32)
            made.append(weakref.ref(array))
            call.send(InferResponse([Tensor("OUTPUT0", "FP32", array)]))

    gc.collect()
    gc.disable()
    try:
        async with served(model_config(ECHO, "dynamic_batching {}"), execute) as model:
            await asyncio.gather(*(model.infer(echo_request(n)) for n in range(8)))
            await until(lambda: all(reference() is None for reference in made))
            assert len(made) == 8
    finally:
        gc.enable()
