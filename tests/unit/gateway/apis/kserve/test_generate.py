"""generate and generate_stream: statuses, frames, cancellation, and what leaves together."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError, QueueFullError, UnsupportedError
from penstock.gateway.apis.kserve import generate as generate_frames
from penstock.gateway.apis.kserve.generate import generate
from penstock.gateway.apis.kserve.infer_json import to_json
from penstock.gateway.apis.kserve.parameters import forward_pattern
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.requests.call import DrainState
from penstock.gateway.transports.http.exchange import Exchange
from protocol.asgi_client import AsgiCall
from support.endpoint import answer, call, kserve
from support.kserve import FakeModel, FakeModelStore, identity, repeat, tensor_config

NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
Script = Callable[[InferRequest], Iterable[InferResponse | asyncio.Event]]


def text(value: bytes, *, final: bool = False) -> InferResponse:
    array = np.empty(1, np.object_)
    array[0] = value
    return InferResponse([Tensor("text_output", "BYTES", array)], final=final)


def end() -> InferResponse:
    return InferResponse(None)


def failure(error: PenstockError, *, final: bool = True) -> InferResponse:
    return InferResponse(None, error=error, final=final)


def llm(*responses: InferResponse | asyncio.Event) -> FakeModel:
    """A decoupled model that gives these responses to every request."""
    config = (
        'name: "llm" backend: "python" model_transaction_policy { decoupled: true } '
        f"input {tensor_config('text_input', 'BYTES', [1])} "
        f"input {tensor_config('stream', 'BOOL', [1], 'optional: true')} "
        f"output {tensor_config('text_output', 'BYTES', [1])}"
    )
    model = FakeModel(config, lambda request: [])
    model.script = lambda request: responses
    return model


class Server:
    """The endpoints over some models."""

    def __init__(self, *models: FakeModel, **settings: Any) -> None:
        self._context = kserve(FakeModelStore(*models), **settings)
        self._name = models[0].name

    def call(self, body: Any, *, stream: bool, name: str = "", version: str = "", **options: Any) -> AsgiCall:
        async def endpoint(exchange: Exchange) -> None:
            await generate(self._context, exchange, name or self._name, version, stream=stream)

        return call(endpoint, body, **options)

    async def generate(self, body: Any, **options: Any) -> tuple[int, Any]:
        done = await self.call(body, stream=False, **options).run()
        return done.status, json.loads(b"".join(done.bodies))

    async def stream(self, body: Any, **options: Any) -> AsgiCall:
        return await self.call(body, stream=True, **options).run()


HEAD = b'"model_name":"llm","model_version":"1",'


def frame(value: str) -> bytes:
    return b"data: {" + HEAD + b'"text_output":"%s"}\n\n' % value.encode()


async def test_one_response_of_a_plain_model() -> None:
    server = Server(identity("FP32", [2], "typ", 8))
    assert await server.generate({"INPUT0": [1, 2], "id": "7"}) == (
        200,
        {"OUTPUT0": [1.0, 2.0], "id": "7", "model_name": "typ", "model_version": "1"},
    )
    done = await server.stream({"INPUT0": [1, 2, 3, 4]})
    assert b"".join(done.bodies) == (b'data: {"OUTPUT0":[1.0,2.0,3.0,4.0],"model_name":"typ","model_version":"1"}\n\n')


@pytest.mark.parametrize("stream", [False, True])
async def test_long_answers_are_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Millions of numbers would hold up all other requests for seconds."""
    threads: list[int] = []

    def noted(tensor: Tensor) -> Any:
        threads.append(threading.get_ident())
        return to_json(tensor)

    monkeypatch.setattr(generate_frames, "to_json", noted)
    count = 1 << 17
    done = await Server(identity("FP32", name="m")).call({"INPUT0": [1.0] * count}, stream=stream).run()
    assert (done.status, b"".join(done.bodies).count(b"1.0")) == (200, count)
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


async def test_headers_of_both() -> None:
    server = Server(llm(text(b"a"), end()))
    done = await server.call({"text_input": "x"}, stream=False).run()
    assert (done.status, done.headers["content-type"]) == (200, "application/json")
    done = await server.stream({"text_input": "x"})
    assert (done.status, done.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert done.headers["x-request-id"]


async def test_one_response_of_a_decoupled_model() -> None:
    for script in ([text(b"a"), end()], [text(b"a", final=True)], [text(b"a")]):
        model = llm(*script)
        assert await Server(model).generate({"text_input": "x"}) == (
            200,
            {"model_name": "llm", "model_version": "1", "text_output": "a"},
        )
        assert model.streams[0].closed.is_set()


@pytest.mark.parametrize("script", [[], [end()], [text(b"a"), text(b"b"), end()], [text(b"a"), text(b"b", final=True)]])
async def test_generate_wants_exactly_one_response(script: list[InferResponse]) -> None:
    model = llm(*script)
    assert await Server(model).generate({"text_input": "x"}) == (400, {"error": NOT_ONE})
    assert model.streams[0].closed.is_set()


async def test_a_second_response_cancels_the_rest() -> None:
    model = llm(text(b"a"), text(b"b"), asyncio.Event(), text(b"c"))
    status, said = await Server(model).generate({"text_input": "x"})
    assert status == 400
    assert "exactly 1 response" in said["error"]


async def test_what_is_ready_together_leaves_together() -> None:
    gate = asyncio.Event()
    server = Server(llm(text(b"a"), text(b"b"), gate, text(b"c"), end()))
    running = server.call({"text_input": "x"}, stream=True)
    task = asyncio.create_task(running.run())
    while len(running.messages) < 2:
        running.sent.clear()
        await running.sent.wait()
    assert running.bodies == [frame("a") + frame("b")]
    gate.set()
    await task
    assert running.bodies == [frame("a") + frame("b"), frame("c")]
    assert running.complete


async def test_a_stream_may_be_empty() -> None:
    for script in ([end()], []):
        done = await Server(llm(*script)).stream({"text_input": "x"})
        assert (done.status, b"".join(done.bodies)) == (200, b"")


async def test_numbers_one_by_one() -> None:
    done = await Server(repeat()).stream({"IN": 3, "id": "q"})
    expected = [{"OUT": index, "id": "q", "model_name": "repeat", "model_version": "1"} for index in range(3)]
    frames = b"".join(done.bodies).decode().split("\n\n")
    assert [json.loads(each.removeprefix("data: ")) for each in frames[:-1]] == expected
    assert frames[-1] == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("bad"), 400),
        (EngineError("boom"), 500),
        (UnsupportedError("no"), 501),
        (QueueFullError("Exceeds maximum queue size"), 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_instead_of_the_first_response_has_a_status(
    error: PenstockError, status: int, stream: bool
) -> None:
    model = llm(failure(error))
    done = await Server(model).call({"text_input": "x"}, stream=stream).run()
    assert (done.status, done.headers["content-type"]) == (status, "application/json")
    assert json.loads(b"".join(done.bodies)) == {"error": error.message}
    assert model.streams[0].closed.is_set()


async def test_a_refusal_has_a_status() -> None:
    model = identity("FP32", [2], "typ")
    model.error = QueueFullError("Exceeds maximum queue size")
    for stream in (False, True):
        done = await Server(model).call({"INPUT0": [1, 2]}, stream=stream).run()
        assert done.status == 503


async def test_a_later_error_is_an_event_in_its_own_words() -> None:
    done = await Server(llm(text(b"a"), failure(EngineError("late")))).stream({"text_input": "x"})
    assert done.status == 200
    assert b"".join(done.bodies) == frame("a") + b'data: {"error":"late"}\n\n'


async def test_a_stream_goes_on_after_an_error_that_is_not_final() -> None:
    script = [text(b"a"), failure(EngineError("one"), final=False), text(b"b"), end()]
    done = await Server(llm(*script)).stream({"text_input": "x"})
    assert b"".join(done.bodies) == frame("a") + b'data: {"error":"one"}\n\n' + frame("b")


async def test_a_bug_in_the_stream_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: InferRequest) -> Iterable[InferResponse]:
        yield text(b"a")
        raise ZeroDivisionError("secret")

    model = llm()
    model.script = script
    done = await Server(model).stream({"text_input": "x"})
    said = b"".join(done.bodies)
    assert said.startswith(frame("a") + b'data: {"error":"')
    assert b"secret" not in said
    assert "secret" in caplog.text
    assert done.complete


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_request(stream: bool) -> None:
    model = llm(text(b"a"), asyncio.Event())
    running = Server(model).call({"text_input": "x"}, stream=stream)
    task = asyncio.create_task(running.run())
    if stream:
        while len(running.messages) < 2:
            running.sent.clear()
            await running.sent.wait()
    else:
        while not model.streams:
            await asyncio.sleep(0)
    running.disconnect()
    await asyncio.wait_for(task, 20)
    assert model.streams[0].closed.is_set()
    assert not running.complete


async def test_a_client_that_leaves_cancels_a_plain_model() -> None:
    model = identity("FP32", [1], "typ")
    model.gate = asyncio.Event()
    running = Server(model).call({"INPUT0": 1}, stream=False)
    task = asyncio.create_task(running.run())
    await model.waiting.wait()
    running.disconnect()
    await asyncio.wait_for(task, 20)
    assert model.cancelled.is_set()
    assert running.messages == []


async def test_a_drain_that_expires_ends_the_stream_with_an_event() -> None:
    drain = DrainState()
    model = llm(text(b"a"), asyncio.Event())
    running = Server(model).call({"text_input": "x"}, stream=True, drain=drain)
    task = asyncio.create_task(running.run())
    while len(running.messages) < 2:
        running.sent.clear()
        await running.sent.wait()
    drain.expire()
    await asyncio.wait_for(task, 20)
    assert running.bodies[-1] == b'data: {"error":"The server is shutting down."}\n\n'
    assert running.complete
    assert model.streams[0].closed.is_set()
    refused = await Server(model).call({"text_input": "x"}, stream=True, drain=drain).run()
    assert refused.status == 503


async def test_a_slow_reader_is_not_read_ahead_for() -> None:
    """While a write waits, nothing more than one response is asked of the model."""
    asked: list[int] = []

    def script(request: InferRequest) -> Iterable[InferResponse | asyncio.Event]:
        for index in range(100):
            asked.append(index)
            yield text(b"a")
            gate = asyncio.Event()
            asyncio.get_running_loop().call_soon(gate.set)
            yield gate

    model = llm()
    model.script = script
    running = Server(model).call({"text_input": "x"}, stream=True)
    released = asyncio.Event()
    plain = running._send

    async def slow(message: Any) -> None:
        await plain(message)
        if message["type"] == "http.response.body":
            await released.wait()

    running._send = slow  # type: ignore[method-assign]
    task = asyncio.create_task(running.run())
    while len(running.messages) < 2:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asked) <= 2
    running.disconnect()
    await asyncio.wait_for(task, 20)
    assert model.streams[0].closed.is_set()


async def test_unknown_models_and_versions() -> None:
    server = Server(llm(text(b"a")))
    for stream in (False, True):
        done = await server.call({"text_input": "x"}, stream=stream, name="nope").run()
        assert (done.status, json.loads(done.bodies[0])) == (
            404,
            {"error": "Request for unknown model: 'nope' is not found"},
        )
    done = await server.call({"text_input": "x"}, stream=False, version="9").run()
    assert (done.status, json.loads(done.bodies[0])) == (
        404,
        {"error": "Request for unknown model: 'llm' version 9 is not found"},
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'{"text_input":"a"} x',
        b'{"text_input":"\xff"}',
        b'{"text_input":"\\ud800"}',
        b'{"text_input":NaN}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"text_input":' + b"[" * 250_000,
        b'{"text_input":' + b"[" * 120 + b"]" * 120 + b"}",
        {"text_input": ["a"] * 1000},
        {"text_input": "a", "parameters": {"sequence_id": -1}},
        {"text_input": "a", "triton_final_response": True},
    ],
)
async def test_hostile_bodies(body: Any) -> None:
    model = llm(text(b"a"))
    status, said = await Server(model).generate(body)
    assert (status, list(said)) == (400, ["error"])
    assert len(said["error"]) <= 512
    assert model.requests == []


async def test_bodies_have_a_limit() -> None:
    server = Server(llm(text(b"a")), max_input_bytes=100)
    assert (await server.generate({"text_input": "a" * 101}))[0] == 413
    assert (await server.generate(b"", headers={"content-length": "101"}))[0] == 413
    assert await server.generate(b"", headers={"content-length": "-1"}) == (
        400,
        {"error": "Content-Length is not a number."},
    )


async def test_long_arrays() -> None:
    values = list(range(300_000))
    status, said = await Server(identity("INT32", [-1], "typ")).generate({"INPUT0": values})
    assert (status, said["OUTPUT0"] == values) == (200, True)


async def test_content_types_do_not_matter_but_encodings_do() -> None:
    server = Server(llm(text(b"a")))
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await server.generate({"text_input": "a"}, headers=form))[0] == 200
    assert await server.generate({"text_input": "a"}, headers={"content-encoding": "gzip"}) == (
        400,
        {"error": "Unsupported content-encoding, only 'identity' is supported."},
    )


async def test_headers_go_to_the_model() -> None:
    model = llm(text(b"a"))
    server = Server(model, header_forward_pattern=forward_pattern("x-fwd.*"))
    assert (await server.generate({"text_input": "a", "x-fwd": "b"}, headers={"X-Fwd": "h", "x-no": "n"}))[0] == 200
    assert model.requests[0].parameters == {"x-fwd": "h"}
    assert model.requests[0].deadline is None
    assert (await server.generate({"text_input": "a"}, headers={"X-Request-Timeout": "5"}))[0] == 200
    assert model.requests[1].deadline is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_are_traced(stream: bool, tmp_path: Any) -> None:
    tracing = Tracing(str(tmp_path / "t.json"))
    tracing.update({"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1"})
    model = llm(text(b"a"), text(b"", final=False) if stream else end(), end())
    await Server(model, tracing=tracing).call({"text_input": "x", "id": "7"}, stream=stream).run()
    tracing.close()
    found = json.loads((tmp_path / "t.json").read_text())
    assert found[0] == {"id": 1, "model_name": "llm", "model_version": 1, "request_id": "7"}
    marks = [event["timestamps"][0]["name"] for event in found if "timestamps" in event]
    assert sorted(marks) == sorted(
        f"{name}_{end}" for name in ("HTTP_RECV", "REQUEST", "HTTP_SEND") for end in ("START", "END")
    )
    assert marks[:3] + marks[-1:] == ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "HTTP_SEND_END"]
    tensors = [event["tensor"]["name"] for event in found if "tensor" in event]
    assert tensors == ["text_input", "text_output", "text_output"][: 2 + stream]
    assert model.requests[0].trace is not None


async def test_texts_have_no_traces_of_the_machine() -> None:
    _, said = await answer(lambda exchange: generate(kserve(FakeModelStore()), exchange, "x" * 5000, stream=False))
    assert re.fullmatch(r"[^/]*", said["error"])
    assert len(said["error"]) <= 512
