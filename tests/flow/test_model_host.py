"""Requests of several fronts to the models of one host: one queue, one table of sequences, one end for each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import Batch
from penstock.classic.classic_model import ClassicModel
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import NUMPY_TYPES, Tensor
from penstock.engines.errors import (
    AlreadyExistsError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    NotReadyError,
    QueueFullError,
)
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.processes.model_host.messages import MAX_RESPONSES
from penstock.gateway.processes.model_host.remote_models import RemoteModel
from penstock.gateway.requests.context import ANYONE, RequestContext
from support.classic import (
    ECHO,
    FunctionBackend,
    Gate,
    check_books,
    echo,
    echo_request,
    model_config,
    output,
    served,
    until,
)
from support.classic import request as make_request
from support.kserve import FakeModel, FakeModelStore, add_sub, identity, repeat
from support.model_host import Hosted, hosting


def hosting_all(*models: Any, fronts: int = 2, **more: Any) -> Any:
    return hosting(FakeModelStore(*models), fronts, serves=lambda model: True, **more)


def found(hosted: Hosted, front: int, name: str, version: str = "") -> RemoteModel:
    model = hosted.links[front].models.find(name, version)
    assert model is not None
    return model


async def test_requests_of_two_fronts_share_a_batch() -> None:
    gate = Gate()
    async with served(model_config(ECHO, "dynamic_batching {}"), gate) as model, hosting_all(model) as hosted:
        assert isinstance(model, ClassicModel)
        first = asyncio.create_task(found(hosted, 0, "echo").infer(echo_request(0)))
        await until(lambda: len(gate.batches) == 1)
        others = [asyncio.create_task(found(hosted, n % 2, "echo").infer(echo_request(n))) for n in range(1, 7)]
        await until(lambda: model.queued == 6)
        gate.open.set()
        answers = [int(output(await each)[0, 0]) for each in (first, *others)]
        assert answers == list(range(7))
        assert len(gate.batches) == 2
        assert sorted(gate.batches[1]) == [1, 2, 3, 4, 5, 6]
        check_books(model, 7)


async def test_a_sequence_stays_on_its_instance_whatever_front_its_requests_come_from() -> None:
    seen: dict[int, set[str]] = {}
    lock = threading.Lock()

    def make(context: Any) -> Any:
        def execute(batch: Batch) -> None:
            with lock:
                for call in batch.calls:
                    seen.setdefault(int(call.request.inputs["INPUT0"].array[0, 0]), set()).add(context.name)
            echo(batch)

        return execute

    config = model_config(
        ECHO,
        "sequence_batching { max_sequence_idle_microseconds: 60000000 }",
        "instance_group { count: 3 kind: KIND_CPU }",
    )
    ids: list[int | str] = [1, 2, "three"]
    async with served(config, FunctionBackend(make)) as model, hosting_all(model) as hosted:
        for number in range(6):
            requests = [
                echo_request(value, correlation_id=id, sequence_start=number == 0, sequence_end=number == 5)
                for value, id in enumerate(ids)
            ]
            await asyncio.gather(*(found(hosted, (number + n) % 2, "echo").infer(r) for n, r in enumerate(requests)))
        check_books(model, 18)
    assert [len(seen[value]) for value in range(3)] == [1, 1, 1]
    assert len(set.union(*seen.values())) == 3


async def test_everything_that_a_request_says_reaches_the_model() -> None:
    model = add_sub()
    tensor = Tensor("INPUT0", "FP32", np.arange(16, dtype=np.float32))
    context = RequestContext(id="from here", traceparent="00-1")
    asked = InferRequest(
        inputs={"INPUT0": tensor, "INPUT1": Tensor("INPUT1", "FP32", tensor.array)},
        id="mine",
        outputs=("OUTPUT1",),
        parameters={"a": True, "b": 2**64 - 1, "c": float("inf"), "d": "text", "e": -(2**63)},
        priority=3,
        timeout_us=2**63,
        deadline=1e9 + 0.25,
        correlation_id="sequence",
        sequence_start=True,
        sequence_end=True,
        tenant="somebody",
        caller=context,
    )
    model.response_parameters = {"took": 1.5, "good": True}
    async with hosting_all(model) as hosted:
        response = await found(hosted, 0, "add_sub").infer(asked)
    [seen] = model.requests
    names = [
        name for name in InferRequest.__slots__ if name not in ("inputs", "caller", "trace", "timings", "asked_in")
    ]
    assert {name: getattr(seen, name) for name in names} == {name: getattr(asked, name) for name in names}
    assert list(seen.inputs) == ["INPUT0", "INPUT1"]
    assert seen.inputs["INPUT1"].array.tolist() == tensor.array.tolist()
    assert seen.caller is not None
    assert (seen.caller.id, seen.caller.traceparent) == ("from here", "00-1")
    assert response.parameters == {"took": 1.5, "good": True}
    assert [each.name for each in response.outputs or ()] == ["OUTPUT1"]


async def test_tensors_of_every_type_and_size() -> None:
    """Small ones in the message, large ones in shared memory, whose blocks go back."""
    models = {datatype: identity(datatype) for datatype in NUMPY_TYPES}
    async with hosting_all(*models.values(), fronts=1) as hosted:
        for datatype, model in models.items():
            for count in (0, 3, 70_000):
                array = (np.arange(count) % 99).astype(NUMPY_TYPES[datatype])
                if datatype == "BYTES":
                    array[:] = [b"\0x" * (number % 5) for number in range(count)]
                asked = InferRequest(inputs={"INPUT0": Tensor("INPUT0", datatype, array)})
                [given] = (await found(hosted, 0, model.name).infer(asked)).outputs or ()
                assert (given.datatype, given.array.dtype) == (datatype, array.dtype)
                assert given.array.tolist() == array.tolist()
                assert given.array.flags.aligned
            model.requests.clear()
            del given
        connection = hosted.connections[0]
        assert connection._outbox.size > 0
        await until(lambda: connection._lent == 0 and connection._outbox.used == 0)


async def test_a_reload_never_fails_a_request_that_named_no_version() -> None:
    store = FakeModelStore(add_sub())
    async with hosting(store, 1, serves=lambda model: True) as hosted:
        stale = found(hosted, 0, "add_sub")
        named = found(hosted, 0, "add_sub", "1")
        store.by_name["add_sub"] = {2: add_sub(version=2)}
        tensors = {name: Tensor(name, "FP32", np.ones(16, np.float32)) for name in ("INPUT0", "INPUT1")}
        await stale.infer(InferRequest(inputs=tensors))
        assert stale.version == 2
        with pytest.raises(ModelNotFoundError, match="'add_sub' version 1 is not found"):
            await named.infer(InferRequest(inputs=tensors))
        await hosted.host.spread()
        assert found(hosted, 0, "add_sub").version == 2
        assert hosted.links[0].models.find("add_sub", "1") is None


async def test_errors_are_the_host_s_own() -> None:
    model = add_sub()
    model.error = QueueFullError("Full.", retry_after=7)
    async with hosting_all(model) as hosted:
        remote = found(hosted, 0, "add_sub")
        with pytest.raises(QueueFullError, match=r"Full\.") as caught:
            await remote.infer(InferRequest(inputs={}))
        assert caught.value.retry_after == 7
        model.error = None
        with pytest.raises(InvalidRequestError, match="expected 2 inputs but got 0"):
            await remote.infer(InferRequest(inputs={}))


async def test_a_cancelled_request_is_cancelled_in_the_host() -> None:
    model = add_sub()
    model.gate = asyncio.Event()
    async with hosting_all(model) as hosted:
        task = asyncio.create_task(found(hosted, 0, "add_sub").infer(InferRequest(inputs={})))
        await model.waiting.wait()
        task.cancel()
        await asyncio.wait([task])
        await model.cancelled.wait()
        await until(lambda: hosted.host.requests == 0)


async def test_a_stream_that_is_closed_is_closed_in_the_host() -> None:
    model = repeat(gate=asyncio.Event())
    async with hosting_all(model) as hosted:
        stream = found(hosted, 1, "repeat").stream(make_request(IN=[5]))
        assert (await anext(stream)).final is False
        stream.close()
        await until(lambda: bool(model.streams) and model.streams[0].closed.is_set())
        assert [each async for each in stream] == []


async def test_a_reader_that_does_not_read_holds_the_host_back() -> None:
    made = 0
    model = repeat()

    def script(request: InferRequest) -> Iterable[InferResponse]:
        nonlocal made
        for number in range(1000):
            made += 1
            yield InferResponse([Tensor("OUT", "INT32", np.array([number], np.int32))], final=number == 999)

    model.script = script
    async with hosting_all(model) as hosted:
        slow, quick = (found(hosted, 0, "repeat").stream(make_request(IN=[1])) for _ in range(2))
        assert len([each async for each in quick]) == 1000, "it is not held back by the other"
        assert made <= 1000 + MAX_RESPONSES + 1
        assert [int(output(each, "OUT")[0]) async for each in slow] == list(range(1000))


async def ended(hosted: Hosted, gated: FakeModel) -> list[Any]:
    """Requests of both kinds in front 0, which nothing answers."""
    requests = [asyncio.create_task(found(hosted, 0, "add_sub").infer(InferRequest(inputs={}))) for _ in range(3)]

    async def read() -> list[InferResponse]:
        return [each async for each in found(hosted, 0, "repeat").stream(make_request(IN=[2]))]

    requests += [asyncio.create_task(read()) for _ in range(3)]  # type: ignore[arg-type]
    await until(lambda: hosted.host.requests == 6 and len(gated.requests) == 3)
    return requests


async def test_when_the_host_dies_every_request_ends_once() -> None:
    model = add_sub()
    model.gate = asyncio.Event()
    async with hosting_all(model, repeat(gate=asyncio.Event())) as hosted:
        requests = await ended(hosted, model)
        hosted.host.stop()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(each) for each in results[:3]] == [EngineDeadError] * 3
        for responses in results[3:]:
            assert [response.final for response in responses] == [False, True]
            assert isinstance(responses[-1].error, EngineDeadError)
        await hosted.connections[0].ended
        assert not hosted.links[0].models.has("add_sub", "")
        with pytest.raises(NotReadyError):
            await found(hosted, 0, "add_sub").infer(InferRequest(inputs={}))


async def test_when_a_front_dies_its_requests_are_cancelled_and_no_other_s() -> None:
    model = add_sub()
    model.gate = asyncio.Event()
    streaming = repeat(gate=asyncio.Event())
    async with hosting_all(model, streaming) as hosted:
        requests = await ended(hosted, model)
        tensors = {name: Tensor(name, "FP32", np.ones(16, np.float32)) for name in ("INPUT0", "INPUT1")}
        other = asyncio.create_task(found(hosted, 1, "add_sub").infer(InferRequest(inputs=tensors)))
        await until(lambda: hosted.host.requests == 7)
        hosted.connections[0].close()
        async with asyncio.timeout(60):
            await model.cancelled.wait()
            await streaming.streams[0].closed.wait()
        assert hosted.host.requests == 1
        model.gate.set()
        assert output(await other)[0] == 2
        assert all(
            isinstance(each, EngineDeadError | list) for each in await asyncio.gather(*requests, return_exceptions=True)
        )
        assert hosted.host.fronts == 1


async def test_a_front_that_sends_nonsense_is_shut_out_alone() -> None:
    async with hosting_all(add_sub()) as hosted:
        transport = hosted.connections[0]._transport
        assert transport is not None
        transport.write(b"\xff" * 64)
        await hosted.connections[0].ended
        await until(lambda: hosted.host.fronts == 1)
        tensors = {name: Tensor(name, "FP32", np.ones(16, np.float32)) for name in ("INPUT0", "INPUT1")}
        await found(hosted, 1, "add_sub").infer(InferRequest(inputs=tensors))


async def test_traces_are_counted_by_the_owner_and_whole(tmp_path: Any) -> None:
    tracing = Tracing(str(tmp_path / "traces"))
    tracing.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "2"})
    model = add_sub()

    def compute(request: InferRequest) -> list[Tensor]:
        assert request.trace is not None
        child = request.trace.child("inner", 3)
        child.mark("COMPUTE_START", 5)
        child.finish()
        return []

    model._compute = compute
    async with hosting_all(model, tracing=tracing) as hosted:
        tensors = {name: Tensor(name, "FP32", np.ones(16, np.float32)) for name in ("INPUT0", "INPUT1")}
        for front in (0, 1, 0, 1):
            asked = InferRequest(inputs=tensors)
            trace = hosted.links[front].tracing.start("add_sub", 1, f"request {front}")
            if trace is not None:
                trace.inputs(asked)
            await found(hosted, front, "add_sub").infer(asked)
            if trace is not None:
                trace.finish()
        await until(lambda: tracing.settings()["trace_count"] == "0")
        await hosted.host.spread()
        assert not any(link.tracing.active for link in hosted.links)
    tracing.close()
    text = (tmp_path / "traces").read_text()
    assert text.count('"parent_id"') == text.count('"COMPUTE_START"') == 2


async def test_an_unregistered_region_stays_until_no_front_uses_it() -> None:
    regions = SharedMemoryRegions(True)
    memory = SharedMemory(create=True, size=64)
    try:
        async with hosting_all(regions=regions) as hosted:
            for name in ("used", "other"):
                regions.register(name, memory.name, 0, 64)
            await hosted.host.spread()
            first, second = (link.shared_memory for link in hosted.links)
            request, later = RequestContext(id="1"), RequestContext(id="2")
            first.of(ANYONE, lambda size: None, request).slice("used", 0, 8)
            regions.unregister()
            assert len(regions.status()) == 2, "no front has said that it uses none"
            await hosted.host.spread()
            assert [each.name for each in regions.status()] == ["used"]
            with pytest.raises(AlreadyExistsError):
                regions.register("used", memory.name, 0, 64)
            second.of(ANYONE, lambda size: None, later).slice("used", 0, 8)
            request.end()
            later.end()
            await until(lambda: not regions.status())
            await hosted.host.spread()
            for front in (first, second):
                for name in ("used", "other"):
                    with pytest.raises(NotFoundError):
                        front.slice(name, 0, 8)
    finally:
        memory.close()
        memory.unlink()


async def test_a_front_that_dies_uses_no_region() -> None:
    regions = SharedMemoryRegions(True)
    memory = SharedMemory(create=True, size=64)
    try:
        async with hosting_all(regions=regions, fronts=1) as hosted:
            regions.register("used", memory.name, 0, 64)
            await hosted.host.spread()
            hosted.links[0].shared_memory.of(ANYONE, lambda size: None, RequestContext(id="1")).slice("used", 0, 8)
            regions.unregister()
            await hosted.host.spread()
            assert regions.status()
            hosted.connections[0].close()
            await until(lambda: not regions.status())
    finally:
        memory.close()
        memory.unlink()
