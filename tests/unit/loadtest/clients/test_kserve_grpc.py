"""KServe over gRPC, against a service that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2 as pb

from penstock.loadtest.clients.grpc_client import CALLS_PER_CHANNEL, Channels, GrpcClient
from penstock.loadtest.clients.kserve_grpc import GrpcInferClient, GrpcStreamClient
from penstock.loadtest.clients.kserve_model import LanguageForm, ModelMetadata, TensorMetadata
from penstock.loadtest.errors import MALFORMED, STREAM_ERROR, TIMEOUT, TRUNCATED, LoadTestError
from penstock.loadtest.messages import Answer
from unit.loadtest.clients.wires import CALL, OPTIONS

LANGUAGE = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_num_output_tokens": "BOOL",
}


class Service:
    """`infer` and `stream` say what is answered; a stream's is a list of messages, sent without a pause."""

    def __init__(self) -> None:
        self.inputs: list[tuple[str, str, list[int]]] = [(*each, [1]) for each in LANGUAGE.items()]
        self.infer: Callable[[], Any] = pb.ModelInferResponse
        self.stream: Callable[[], list[Any]] = list
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.peers: set[str] = set()
        self.hold = asyncio.Event()
        """Answers wait for it."""
        self.hold.set()
        self.gone = asyncio.Event()
        """A call was cancelled."""

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.peers.add(context.peer())

    async def model_metadata(self, request: Any, context: Any) -> Any:
        found = pb.ModelMetadataResponse(name=request.name)
        for name, datatype, shape in self.inputs:
            found.inputs.add(name=name, datatype=datatype, shape=shape)
        return found

    async def model_infer(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        found = self.infer()
        if isinstance(found, grpc.StatusCode):
            await context.abort(found, "as it was told")
        return found

    async def model_stream_infer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self._note(request, context)
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.gone.set()
                raise
            for found in self.stream():
                if isinstance(found, grpc.StatusCode):
                    await context.abort(found, "as it was told")
                yield found


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Service, str]]:
    service = Service()
    server = grpc.aio.server()
    rpcs = {
        "ModelMetadata": (grpc.unary_unary_rpc_method_handler, service.model_metadata, pb.ModelMetadataRequest),
        "ModelInfer": (grpc.unary_unary_rpc_method_handler, service.model_infer, pb.ModelInferRequest),
        "ModelStreamInfer": (grpc.stream_stream_rpc_method_handler, service.model_stream_infer, pb.ModelInferRequest),
    }
    handlers = {
        name: make(call, kind.FromString, lambda m: m if isinstance(m, bytes) else m.SerializeToString())
        for name, (make, call, kind) in rpcs.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        service.hold.set()
        await server.stop(None)


@asynccontextmanager
async def opened(kind: type[GrpcClient], url: str, **options: Any) -> AsyncIterator[GrpcClient]:
    client = kind(msgspec.structs.replace(OPTIONS, **{"url": url} | options))
    await client.open()
    try:
        yield client
    finally:
        await client.close()


def part(text: str | None = None, tokens: int | None = None, *, final: bool | None = None) -> Any:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    if text is not None:
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(text).to_bytes(4, "little") + text.encode())
    if tokens is not None:
        response.outputs.add(name="num_output_tokens", datatype="UINT32", shape=[1])
        response.raw_output_contents.append(tokens.to_bytes(4, "little"))
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    return message


async def streamed(*parts: Any, **options: Any) -> tuple[Answer, Service]:
    async with serving() as (service, url), opened(GrpcStreamClient, url, **options) as client:
        service.stream = lambda: list(parts)
        return await client.send(CALL), service


async def inferred(found: Any, **options: Any) -> tuple[Answer, Service]:
    async with serving() as (service, url):
        service.inputs = [("X", "FP32", [-1, 2])]
        service.infer = lambda: found
        async with opened(GrpcInferClient, url, **options) as client:
            return await client.send(CALL), service


async def test_a_stream_of_a_language_model() -> None:
    options = {"api_key": "k", "headers": {"X-Tenant": "t"}, "keep_text": True}
    parts = [part("a", 1, final=False), part("", 0), part("bc", 2), part(final=True)]
    answer, service = await streamed(*parts, **options)
    assert (answer.error, answer.output_tokens, answer.pieces, answer.text) == ("", 3, [1, 2], "abc")
    assert answer.sent < answer.arrivals[0] <= answer.arrivals[1] <= answer.ended
    [request], [metadata] = service.requests, service.metadata
    assert (metadata["authorization"], metadata["x-tenant"]) == ("Bearer k", "t")
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    contents = dict(zip((each.name for each in request.inputs), request.raw_input_contents, strict=True))
    assert {each.name: each.datatype for each in request.inputs} == LANGUAGE
    assert contents["text_input"] == b"\5\0\0\0hello"
    assert contents["stream"] == b"\1"
    assert json.loads(contents["sampling_parameters"][4:]) == {"max_tokens": 4, "ignore_eos": True}


async def test_a_stream_without_counts_or_a_last_word() -> None:
    answer, _ = await streamed(part("a"), part(""), part("b", final=True))
    assert (answer.error, len(answer.arrivals), answer.output_tokens) == ("", 2, None)
    for parts in ([part("a"), part("b")], [part("a", final=False)], []):
        answer, _ = await streamed(*parts)
        assert answer.error == TRUNCATED


async def test_streams_that_fail() -> None:
    answer, _ = await streamed(part("a"), pb.ModelStreamInferResponse(error_message="died"))
    assert (answer.error, answer.detail, len(answer.arrivals)) == (STREAM_ERROR, "died", 1)
    answer, _ = await streamed(part("a"), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (answer.error, answer.detail) == ("grpc_RESOURCE_EXHAUSTED", "as it was told")
    answer, _ = await streamed(b"\xff\xff")
    assert answer.error == MALFORMED
    broken = part("abc", final=True)
    broken.infer_response.raw_output_contents[0] = b"\x09\0\0\0abc"
    answer, _ = await streamed(broken)
    assert answer.error == MALFORMED
    typed = part("abc", final=True)
    typed.infer_response.ClearField("raw_output_contents")
    answer, _ = await streamed(typed)
    assert (answer.error, answer.detail) == (MALFORMED, "1 outputs with 0 contents")


async def test_streams_that_are_refused_before_their_request_was_read() -> None:
    """By a server in threads: on this event loop the request would always be written first."""

    def refuse(requests: object, context: Any) -> None:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "as it was told")

    handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(refuse)}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    options = msgspec.structs.replace(OPTIONS, url=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    client = GrpcStreamClient(options)
    inputs = [TensorMetadata(name, datatype, [1]) for name, datatype in LANGUAGE.items()]
    client._form = LanguageForm(options, ModelMetadata(inputs))
    try:
        call = msgspec.structs.replace(CALL, prompt="x" * 1_000_000)
        answers = [each for _ in range(4) for each in await asyncio.gather(*(client.send(call) for _ in range(25)))]
    finally:
        await client.close()
        server.stop(None).wait()
    assert {(answer.error, answer.detail) for answer in answers} == {("grpc_RESOURCE_EXHAUSTED", "as it was told")}


def outputs(*sizes: int, shape: tuple[int, ...] = (1, 2), datatype: str = "FP32") -> Any:
    found = pb.ModelInferResponse()
    for size in sizes:
        found.outputs.add(name="Y", datatype=datatype, shape=shape)
        found.raw_output_contents.append(b"\0" * size)
    return found


async def test_an_inference() -> None:
    answer, service = await inferred(outputs(8, 8), batch_size=3, extra={"parameters": {"a": 1, "b": "x", "c": True}})
    assert (answer.error, answer.output_tokens, answer.arrivals) == ("", 0, [])
    assert answer.sent < answer.ended
    [request] = service.requests
    assert (request.model_name, list(request.inputs[0].shape)) == ("m", [3, 2])
    assert len(request.raw_input_contents[0]) == 24
    assert request.parameters["a"].int64_param == 1
    assert request.parameters["b"].string_param == "x"
    assert request.parameters["c"].bool_param


async def test_a_status_of_ok_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives None for it."""

    class Channel:
        def unary_unary(self, name: str) -> Callable[..., Awaitable[None]]:
            async def call(request: bytes, metadata: object) -> None:
                return None

            return call

        def get_state(self, try_to_connect: bool) -> grpc.ChannelConnectivity:
            return grpc.ChannelConnectivity.READY

        async def close(self) -> None:
            pass

    monkeypatch.setattr(Channels, "_open", lambda self: Channel())
    async with opened(GrpcInferClient, "h:1", input_tensor=("X:FP32:1",)) as client:
        answer = await client.send(CALL)
    assert (answer.error, answer.detail) == (MALFORMED, "a status of OK without an answer")
    with pytest.raises(LoadTestError, match="without an answer"):
        async with opened(GrpcInferClient, "h:1"):
            pass


@pytest.mark.parametrize("kind", [GrpcInferClient, GrpcStreamClient])
async def test_a_server_that_takes_connections_and_says_nothing(kind: type[GrpcClient]) -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silence, "127.0.0.1", 0) as server:
        url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(LoadTestError, match="nothing came"):
            async with opened(kind, url, timeout=0.05):
                pass


async def test_a_header_goes_before_the_key() -> None:
    _, service = await inferred(outputs(8), api_key="k", headers={"Authorization": "Basic abc", "X_y.z": " 1"})
    [metadata] = service.metadata
    assert (metadata["authorization"], metadata["x_y.z"]) == ("Basic abc", " 1")


async def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    answer, _ = await inferred(outputs(8))
    assert answer.error == ""


@pytest.mark.parametrize("found", [outputs(), outputs(7), outputs(8, 4), b"\xff"])
async def test_inferences_that_lack_something(found: Any) -> None:
    answer, _ = await inferred(found)
    assert answer.error == MALFORMED


async def test_a_status_is_an_error_with_its_message() -> None:
    answer, _ = await inferred(grpc.StatusCode.UNAVAILABLE)
    assert (answer.error, answer.detail) == ("grpc_UNAVAILABLE", "as it was told")


@pytest.mark.parametrize("kind", [GrpcInferClient, GrpcStreamClient])
async def test_cancelling_and_time_that_runs_out_end_the_call(kind: type[GrpcClient]) -> None:
    async with serving() as (service, url):
        if kind is GrpcInferClient:
            service.inputs = [("X", "FP32", [2])]
        async with opened(kind, url) as client:
            service.hold.clear()
            sending = asyncio.create_task(client.send(CALL))
            while not service.requests:
                await asyncio.sleep(0.01)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await asyncio.wait_for(service.gone.wait(), 20)
        service.gone.clear()
        async with opened(kind, url, timeout=1.0) as client:
            assert (await client.send(CALL)).error == TIMEOUT
            await asyncio.wait_for(service.gone.wait(), 20)


async def test_many_calls_have_several_connections() -> None:
    calls = 2 * CALLS_PER_CHANNEL + 1
    async with serving() as (service, url):
        service.inputs = [("X", "FP32", [2])]
        service.infer = lambda: outputs(8)
        service.hold.clear()
        async with opened(GrpcInferClient, url) as client:
            sending = asyncio.gather(*(client.send(CALL) for _ in range(calls)))
            while len(service.requests) < calls:
                await asyncio.sleep(0.01)
            service.hold.set()
            answers = await sending
            assert {answer.error for answer in answers} == {""}
            assert sum(answer.connect > 0 for answer in answers) == calls - CALLS_PER_CHANNEL, "one was open"
            assert len(service.peers) == 3
            assert {(await client.send(CALL)).error for _ in range(3)} == {""}
            assert len(service.peers) == 3


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LoadTestError, match="UNAVAILABLE"):
            async with opened(GrpcInferClient, url):
                pass
        async with opened(GrpcInferClient, url, input_tensor=("X:FP32:1",)) as client:
            assert (await client.send(CALL)).error == "grpc_UNAVAILABLE"


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"url": "127.0.0.1"}, "url"),
        ({"url": "ftp://h:1"}, "url"),
        ({"url": "h:1/path"}, "url"),
        ({"url": "h:port"}, "url"),
        ({"url": "h:0"}, "url"),
        ({"url": "h:1#x"}, "url"),
        ({"url": "grpc://user:secret@h:1"}, "url"),
        ({"headers": {"X": "ü"}}, "header"),
        ({"headers": {"X!y": "z"}}, "header"),
        ({"headers": {"x-bin": "z"}}, "header"),
        ({"headers": {"Content-Type": "z"}}, "header"),
        ({"headers": {"grpc-timeout": "1S"}}, "header"),
        ({"verify_tls": False}, "verify-tls"),
        ({"keep_alive": False}, "keep-alive"),
        ({"model": ""}, "model"),
    ],
)
def test_options_that_grpc_has_no_place_for(options: dict[str, Any], setting: str) -> None:
    with pytest.raises(LoadTestError, match=setting):
        GrpcInferClient(msgspec.structs.replace(OPTIONS, **options))


@pytest.mark.parametrize("extra", [{"id": "x"}, {"parameters": 3}, {"parameters": {"a": [1]}}])
async def test_extras_that_grpc_has_no_place_for(extra: dict[str, Any]) -> None:
    with pytest.raises(LoadTestError, match="extra"):
        await inferred(outputs(8), extra=extra)


async def test_inputs_that_the_model_does_not_have() -> None:
    with pytest.raises(LoadTestError, match="temperature"):
        await streamed(extra={"temperature": 1.0})
    async with serving() as (service, url):
        service.inputs = [("text_input", "BYTES", [-1, 1]), ("max_tokens", "INT32", [-1, 1])]
        async with opened(GrpcStreamClient, url, ignore_eos=False, extra={"max_tokens": "many"}) as client:
            with pytest.raises(LoadTestError, match="INT32"):
                await client.send(CALL)


async def test_a_model_of_tritons_tensorrt_llm_backend() -> None:
    async with serving() as (service, url):
        service.inputs = [(name, kind, [-1, 1]) for name, kind in (("text_input", "BYTES"), ("max_tokens", "INT32"))]
        service.stream = lambda: [part("a", final=True)]
        async with opened(GrpcStreamClient, url, ignore_eos=False) as client:
            assert (await client.send(CALL)).error == ""
    [request] = service.requests
    assert [list(each.shape) for each in request.inputs] == [[1, 1], [1, 1]]
    assert list(request.raw_input_contents) == [b"\5\0\0\0hello", b"\4\0\0\0"]


@pytest.mark.parametrize(
    ("url", "target"),
    [("h:1", "h:1"), ("grpc://h:1", "h:1"), ("http://h:1/", "h:1"), ("[::1]:9", "[::1]:9"), ("grpcs://h:1", "h:1")],
)
def test_a_url_of_any_scheme_is_host_and_port(url: str, target: str) -> None:
    assert Channels(msgspec.structs.replace(OPTIONS, url=url)).target == target
