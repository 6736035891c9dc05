"""ModelStreamInfer: the order and marks of responses, errors within the stream, back-pressure, cancellation."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import DeadlineExceededError, EngineError
from penstock.gateway.apis.kserve.grpc.rpc import abort
from support.grpc import (
    SECONDS,
    Running,
    add_sub_request,
    each,
    floats,
    infer_request,
    read_all,
    repeat_request,
    serving,
    transport,  # noqa: F401
)
from support.kserve import FakeModel, add_sub, repeat

FINAL = "triton_final_response"
STRICT = (("triton_grpc_error", "true"),)
EMPTY_FINAL = {"triton_enable_empty_final_response": True}


def number(value: int, *, final: bool = False) -> InferResponse:
    return InferResponse([Tensor("OUT", "INT32", np.array([value], np.int32))], final=final)


def scripted(*script: InferResponse | asyncio.Event | Exception) -> FakeModel:
    """The decoupled model `repeat` with these responses."""
    model = repeat()

    def play(request: InferRequest) -> Iterator[InferResponse | asyncio.Event]:
        for item in script:
            if isinstance(item, Exception):
                raise item
            yield item

    model.script = play
    return model


async def talk(running: Running, *messages: object, metadata: tuple[tuple[str, str], ...] = ()) -> list[object]:
    """Short forms of what comes back: the value, FINAL for a bare end, or (error, final or None)."""
    stream = running.stub.ModelStreamInfer(each(messages), metadata=metadata, timeout=SECONDS)
    return [short(message) for message in await read_all(stream)]


def short(message: pb.ModelStreamInferResponse) -> object:
    response = message.infer_response
    final = response.parameters[FINAL].bool_param if FINAL in response.parameters else None
    if message.error_message:
        assert response.id == "7"
        assert not response.outputs
        assert (response.model_name != "") == (final is not None)
        return message.error_message, final
    if not response.outputs:
        assert (response.model_version, final) == ("", True)
        return FINAL
    return int(np.frombuffer(response.raw_output_contents[0], np.int32)[0]), final


async def test_responses_of_a_decoupled_model() -> None:
    async with serving(repeat()) as running:
        assert await talk(running, repeat_request(3)) == [(0, False), (1, False), (2, False)]
        assert await talk(running, repeat_request(2, **EMPTY_FINAL)) == [(0, False), (1, False), FINAL]
        assert await talk(running, repeat_request(0, **EMPTY_FINAL)) == [FINAL]
        assert await talk(running, repeat_request(0)) == []
        assert await talk(running) == []


async def test_a_model_with_one_response_is_final_with_it() -> None:
    async with serving(add_sub()) as running:
        (message,) = await read_all(running.stub.ModelStreamInfer(each([add_sub_request(**EMPTY_FINAL)])))
        response = message.infer_response
        assert (response.model_name, response.model_version, response.id) == ("add_sub", "1", "7")
        assert response.parameters[FINAL].bool_param
        assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [4.0] * 16


async def test_an_error_leaves_the_stream_open() -> None:
    model = scripted(
        number(0), InferResponse(None, error=EngineError("An Error Occurred"), final=False), number(1, final=True)
    )
    async with serving(model, add_sub()) as running:
        found = await talk(running, repeat_request(1), repeat_request(1))
        assert sorted(map(str, found)) == sorted(map(str, [(0, False), ("An Error Occurred", False), (1, True)] * 2))
    async with serving(scripted(number(0), EngineError("An Error Occurred"))) as running:
        assert await talk(running, repeat_request(1)) == [(0, False), ("An Error Occurred", True)]


async def test_requests_that_never_began_have_no_final_flag() -> None:
    async with serving(repeat(), add_sub()) as running:
        found = await talk(
            running,
            pb.ModelInferRequest(model_name="zz", id="7"),
            repeat_request(1, triton_zz=True),
            repeat_request(1, triton_enable_empty_final_response=1),
            infer_request("add_sub", {"INPUT0": floats()}),
            repeat_request(1),
        )
        assert set(found) == {
            ("Request for unknown model: 'zz' is not found", None),
            (
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                "starting with 'triton_' are allowed: triton_enable_empty_final_response",
                None,
            ),
            ("invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.", None),
            ("[request id: 7] expected 2 inputs but got 1 inputs for model 'add_sub'.", None),
            (0, False),
        }


async def test_strict_streams_end_with_the_first_error() -> None:
    never = asyncio.Event()
    waiting = scripted(number(5), never)
    waiting.name = "waiting"
    failing = scripted(number(0), EngineError("An Error Occurred"), number(1))
    async with serving(failing, waiting) as running:
        early = pb.ModelInferRequest(model_name="zz", id="7")
        stream = running.stub.ModelStreamInfer(metadata=STRICT)
        await stream.write(early)
        assert (await stream.read()).error_message == "Request for unknown model: 'zz' is not found"
        await stream.write(infer_request("waiting", {"IN": np.array([1], np.int32)}))
        assert short(await stream.read()) == (5, False)
        await stream.write(repeat_request(1))
        assert short(await stream.read()) == (0, False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert (caught.value.code().name, caught.value.details()) == ("INTERNAL", "An Error Occurred")
        await asyncio.wait_for(waiting.streams[0].closed.wait(), SECONDS)
        assert await running.drain.wait_idle(SECONDS)


async def test_many_requests_at_once_each_in_order() -> None:
    async with serving(repeat()) as running:
        requests = [repeat_request(5, str(index)) for index in range(200)]
        found: dict[str, list[int]] = {}
        for message in await read_all(running.stub.ModelStreamInfer(each(requests))):
            response = message.infer_response
            value = int(np.frombuffer(response.raw_output_contents[0], np.int32)[0])
            found.setdefault(response.id, []).append(value)
        assert found == {str(index): [0, 1, 2, 3, 4] for index in range(200)}


async def test_later_requests_overtake_waiting_ones() -> None:
    gate = asyncio.Event()
    async with serving(repeat(gate=gate), add_sub()) as running:
        stream = running.stub.ModelStreamInfer()
        await stream.write(repeat_request(2))
        assert short(await stream.read()) == (0, False)
        await stream.write(add_sub_request())
        assert (await stream.read()).infer_response.model_name == "add_sub"
        gate.set()
        assert short(await stream.read()) == (1, False)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


def gated(gates: dict[str, asyncio.Event], opens: dict[str, asyncio.Event] | None = None) -> FakeModel:
    """The model `add_sub`: requests with these ids wait, those with others open."""
    model = add_sub()

    def play(request: InferRequest) -> Iterator[InferResponse | asyncio.Event]:
        if opens and request.id in opens:
            opens[request.id].set()
        if request.id in gates:
            yield gates[request.id]
        yield InferResponse([Tensor("OUTPUT0", "FP32", floats(1))], final=True)

    model.script = play
    return model


async def test_models_with_one_response_answer_in_the_order_of_their_requests() -> None:
    """Report server#4918. As in Triton 2.51, errors among them; what a decoupled model sends waits for nobody."""
    gates = {"0": asyncio.Event(), "1": asyncio.Event()}
    async with serving(gated(gates), repeat()) as running:
        stream = running.stub.ModelStreamInfer()
        for request in (
            add_sub_request("0"),
            add_sub_request("1"),
            add_sub_request("2"),
            infer_request("nowhere", {}, "3"),
            repeat_request(1, "4", **EMPTY_FINAL),
            add_sub_request("5"),
        ):
            await stream.write(request)
        assert [(await stream.read()).infer_response.id for _ in range(2)] == ["4", "4"]
        gates["1"].set()
        assert short(await ask_again(stream)) == (0, False)
        gates["0"].set()
        assert [(await stream.read()).infer_response.id for _ in range(5)] == ["0", "1", "2", "3", "5"]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def ask_again(stream: Any) -> pb.ModelStreamInferResponse:
    """What comes next after everything before has had time to answer."""
    await stream.write(repeat_request(1))
    return await stream.read()


@pytest.mark.parametrize(("sequences", "order"), [(False, "012"), (True, "102")])
async def test_a_full_stream_does_not_wait_for_requests_of_sequences(sequences: bool, order: str) -> None:
    """The first may need what the third brings, which is not read before one of the others has been answered."""
    gate = asyncio.Event()
    model = gated({"0": gate}, {"2": gate} if sequences else {"1": gate})
    async with serving(model, max_requests_per_stream=2) as running:
        parameters = [{"sequence_id": number + 1, "sequence_start": True} if sequences else {} for number in range(3)]
        requests = [add_sub_request(str(number), **parameters[number]) for number in range(3)]
        answers = await read_all(running.stub.ModelStreamInfer(each(requests), timeout=SECONDS))
        found = "".join(answer.infer_response.id for answer in answers)
        assert found == order or (sequences and found == "120")


async def test_no_more_requests_at_once_than_allowed() -> None:
    gate = asyncio.Event()
    model = repeat(gate=gate)
    async with serving(model, max_requests_per_stream=3) as running:
        stream = running.stub.ModelStreamInfer(each([repeat_request(1, str(n), **EMPTY_FINAL) for n in range(10)]))
        assert {(await stream.read()).infer_response.id for _ in range(3)} == {"0", "1", "2"}
        assert (len(model.requests), running.drain.in_flight) == (3, 3)
        gate.set()
        assert len(await read_all(stream)) == 17
        assert len(model.requests) == 10


class Counting:
    """Large responses without end; counts those that were taken."""

    def __init__(self) -> None:
        self.taken = 0
        self.model = repeat()
        self.model.script = lambda request: self._responses()

    def _responses(self) -> Iterator[InferResponse]:
        while True:
            self.taken += 1
            yield InferResponse([Tensor("OUT", "INT32", np.zeros(1 << 16, np.int32))], final=False)


async def test_a_reader_that_does_not_read_holds_the_model_back() -> None:
    counting = Counting()
    async with serving(counting.model, add_sub()) as running:
        channel = grpc.aio.insecure_channel(running.address, options=[("grpc.http2.bdp_probe", 0)])
        stub = GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer()
        await stream.write(repeat_request(1))
        await stream.read()
        for _ in range(500):  # ample time to produce more than the windows of one connection hold
            await running.stub.ModelInfer(add_sub_request())
        assert counting.taken < 200, "responses of 256 KiB pile up"
        stream.cancel()
        await asyncio.wait_for(counting.model.streams[0].closed.wait(), SECONDS)
        await channel.close()


@pytest.mark.parametrize(("passed", "code"), [(2 * SECONDS, "DEADLINE_EXCEEDED"), (0, "OK")])
async def test_the_caller_s_deadline_ends_the_stream_and_the_server_s_only_the_request(
    passed: float, code: str
) -> None:
    model = scripted(DeadlineExceededError("Too late."))
    play = model.script

    def play_later(request: InferRequest) -> Iterator[InferResponse | asyncio.Event]:
        assert request.deadline is not None
        request.deadline -= passed  # the model's clock is ahead of the gRPC library's
        return play(request)

    model.script = play_later
    async with serving(model) as running:
        stream = running.stub.ModelStreamInfer(each([repeat_request(1)]), timeout=SECONDS)
        assert short(await stream.read()) == ("Too late.", True)
        assert (await stream.code()).name == code


async def test_an_rpc_that_is_over_gets_no_status() -> None:
    class Over:
        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            raise grpc.aio.InternalError("the batch failed")

    with pytest.raises(asyncio.CancelledError):
        await abort(Over(), EngineError("x"))


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_a_caller_that_leaves_ends_all_requests_of_the_stream(how: str) -> None:
    model = repeat(gate=asyncio.Event())
    async with serving(model) as running:
        channel = grpc.aio.insecure_channel(running.address)
        stream = GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=2 if how == "deadline" else None)
        for index in range(3):
            await stream.write(repeat_request(2, str(index)))
        for _ in range(3):
            await stream.read()
        assert running.drain.in_flight == 3
        if how == "cancel":
            stream.cancel()
        elif how == "close":
            await channel.close()
        for each_stream in model.streams:
            await asyncio.wait_for(each_stream.closed.wait(), SECONDS)
        assert await running.drain.wait_idle(SECONDS)
        if how == "deadline":
            assert all(request.deadline is not None for request in model.requests)
        await channel.close()


async def test_a_drain_refuses_new_requests_and_ends_old_ones_at_expiry() -> None:
    gate = asyncio.Event()
    async with serving(repeat(gate=gate)) as running:
        stream = running.stub.ModelStreamInfer()
        await stream.write(repeat_request(3))
        assert short(await stream.read()) == (0, False)
        running.drain.begin()
        await stream.write(repeat_request(1))
        message, final = short(await stream.read())  # type: ignore[misc]
        assert "shutting down" in message
        assert final is None
        running.drain.expire()
        assert "shutting down" in (await stream.read()).error_message
        assert await running.drain.wait_idle(SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ModelStreamInfer().read()
        assert caught.value.code().name == "UNAVAILABLE"


async def test_hostile_messages_on_a_stream() -> None:
    async with serving(repeat()) as running:
        raw = running.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        stream = raw(each([b"\xff" * 9, repeat_request(1).SerializeToString()]))
        found = {pb.ModelStreamInferResponse.FromString(data).error_message for data in await read_all(stream)}
        assert found == {"the request message cannot be decoded", ""}


async def test_callbacks_of_the_synchronous_client() -> None:
    async with serving(repeat()) as running:
        got: queue.Queue[object] = queue.Queue()

        def run() -> list[int]:
            with triton.InferenceServerClient(running.address) as client:
                client.start_stream(lambda result, error: got.put(error or result))
                tensor = triton.InferInput("IN", [1], "INT32")
                tensor.set_data_from_numpy(np.array([4], np.int32))
                client.async_stream_infer("repeat", [tensor], enable_empty_final_response=True)
                found = []
                while True:
                    result = got.get(timeout=SECONDS)
                    if result.get_response().parameters[FINAL].bool_param:
                        return found
                    found.append(int(result.as_numpy("OUT")[0]))

        assert await asyncio.to_thread(run) == [0, 1, 2, 3]


async def test_a_stream_without_requests_does_not_hold_up_the_drain() -> None:
    async with serving(add_sub()) as running:
        stream = running.stub.ModelStreamInfer()
        await stream.write(add_sub_request())
        await stream.read()
        running.drain.begin()
        assert await running.drain.wait_idle(SECONDS)
        stream.cancel()
