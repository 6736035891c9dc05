"""Clients of other makers against the gRPC port: grpcio's two, tritonclient's two, grpc-js, nghttp2's, curl. Those that
are not installed are skipped."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from penstock.gateway.transports.grpc.messages import prefix
from support.grpc import Running, add_sub_request, floats, repeat_request, serving
from support.kserve import add_sub, repeat

PATH = "/inference.GRPCInferenceService/"
GRPC_JS = Path(__file__).parent / "grpc_js_client.js"


def needs(command: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(command) is None, reason=f"{command} is not installed")


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with serving(add_sub(), repeat()) as running:
        yield running


async def output_of(*command: str, stdin: bytes | None = None) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed, _ = await process.communicate(stdin)
    return printed.decode("latin-1")


async def test_hundreds_of_streams_given_up_together(running: Running) -> None:
    """By one client again and again, and its connection lives."""
    for _ in range(5):
        streams = [running.stub.ModelStreamInfer() for _ in range(200)]
        for stream in streams:
            await stream.write(repeat_request(1))
        await asyncio.gather(*[stream.read() for stream in streams[:20]])
        for stream in streams:
            stream.cancel()
        await running.stub.ServerLive(pb.ServerLiveRequest())
    assert running.channel.get_state() is grpc.ChannelConnectivity.READY
    while running.drain.in_flight:
        await asyncio.sleep(0.01)


async def test_a_long_error_arrives(running: Running) -> None:
    """The library refuses answers with more than 8 KiB of metadata, and would show none of it."""
    name = "nothing" * 3000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.ModelMetadata(pb.ModelMetadataRequest(name=name))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert str(caught.value.details()).startswith("Request for unknown model: 'nothing")


@pytest.mark.parametrize(
    "compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]
)
async def test_compressed_messages(running: Running, compression: grpc.Compression) -> None:
    answer = await running.stub.ModelInfer(add_sub_request(), compression=compression)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32)[0] == 4


async def test_the_synchronous_clients(running: Running) -> None:
    def calls() -> list[Any]:
        with grpc.insecure_channel(running.address) as channel:
            stub = GRPCInferenceServiceStub(channel)
            answers = [stub.ModelInfer.future(add_sub_request()) for _ in range(300)]
            found: list[Any] = [answer.result().model_name for answer in answers]
        with triton.InferenceServerClient(running.address) as client:
            inputs = [triton.InferInput(name, [16], "FP32") for name in ("INPUT0", "INPUT1")]
            for each in inputs:
                each.set_data_from_numpy(floats())
            done = threading.Event()
            client.start_stream(lambda result, error: (found.append(error), done.set()))
            client.async_stream_infer("add_sub", inputs)
            done.wait(20)
            client.stop_stream()
        return found

    assert await asyncio.to_thread(calls) == ["add_sub"] * 300 + [None]


@needs("h2load")
async def test_h2load_gets_500_answers_on_eight_connections(running: Running, tmp_path: Path) -> None:
    """Eight connections, each with up to 32 streams at a time."""
    body = bytes(add_sub_request().SerializeToString())
    file = tmp_path / "body"
    file.write_bytes(prefix(len(body)) + body)
    kind = "content-type: application/grpc"
    command = ("h2load", "-n500", "-c8", "-m32", f"-d{file}", "-H", kind, f"http://{running.address}{PATH}ModelInfer")
    printed = await output_of(*command)
    assert "500 succeeded, 0 failed, 0 errored" in printed, printed


@needs("nghttp")
async def test_nghttp_gets_its_answer_with_padding_and_a_tiny_window(running: Running, tmp_path: Path) -> None:
    """With padding, and a window of a few bytes."""
    file = tmp_path / "body"
    file.write_bytes(prefix(0))
    flags = ("-v", "--no-dep", "-b100", "-w4", "-W4", f"-d{file}", "-H", "content-type: application/grpc")
    printed = await output_of("nghttp", *flags, f"http://{running.address}{PATH}ServerMetadata")
    assert "grpc-status: 0" in printed, printed


@needs("curl")
async def test_curl_s_calls_are_answered_and_what_is_no_call_is_refused(running: Running) -> None:
    flags = ("-sS", "-i", "--http2-prior-knowledge", "--data-binary", "@-", "-H", "content-type: application/grpc")
    url = f"http://{running.address}{PATH}ServerLive"
    printed = await output_of("curl", *flags, url, stdin=prefix(0))
    assert "HTTP/2 200" in printed
    assert "grpc-status: 0" in printed
    packed = gzip.compress(b"")
    sent = prefix(len(packed), compressed=True) + packed
    assert "grpc-status: 0" in await output_of("curl", *flags, "-H", "grpc-encoding: gzip", url, stdin=sent)
    assert "HTTP/2 415" in await output_of("curl", "-sS", "-i", "--http2-prior-knowledge", "-X", "POST", url)
    assert "HTTP/2 405" in await output_of("curl", "-sS", "-i", "--http2-prior-knowledge", url)
    assert "curl: (" in await output_of("curl", "-sS", "-i", "--http1.1", url)


async def _grpc_js_is_there() -> bool:
    if shutil.which("node") is None:
        return False
    return not await output_of("node", "-e", "require('@grpc/grpc-js')")


@needs("node")
async def test_grpc_js(running: Running) -> None:
    """Found by node through NODE_PATH or in a `node_modules` folder above."""
    if not await _grpc_js_is_there():
        pytest.skip("@grpc/grpc-js is not installed")
    printed = await output_of("node", str(GRPC_JS), running.address, add_sub_request().SerializeToString().hex())
    assert printed.split() == [
        "unary",
        "0",
        "100",
        "unknown",
        "12",
        "deadline",
        "4",
        "cancelled",
        "1",
        "stream",
        "0",
        "20",
    ]
