"""KServe inference over HTTP, and Triton's generate extension."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.http as triton

from penstock.loadtest.clients.kserve_generate import GenerateClient
from penstock.loadtest.clients.kserve_http import InferClient
from penstock.loadtest.errors import MALFORMED, STREAM_ERROR, TRUNCATED, LoadTestError
from penstock.loadtest.messages import Answer
from unit.loadtest.clients.wires import (
    CALL,
    CHUNKED_HEAD,
    LAST_CHUNK,
    OPTIONS,
    answered,
    body_of,
    chunk,
    chunked,
    event,
    raw_server,
    whole,
)

FP32 = {"name": "Y", "datatype": "FP32", "shape": [1, 2]}
VLLM = ("text_input", "stream", "sampling_parameters", "exclude_input_in_output", "return_num_output_tokens")
TRTLLM = ("text_input", "stream", "max_tokens", "bad_words", "stop_words", "temperature")


def encoded(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def metadata(*names: str) -> bytes:
    return whole(encoded(name="m", inputs=[{"name": name, "datatype": "BYTES", "shape": [1]} for name in names]))


async def infer_client(*, binary: bool = False, **options: Any) -> InferClient:
    tensors = ("X:FP32:1,2", "Z:BYTES:1")
    client = InferClient(msgspec.structs.replace(OPTIONS, input_tensor=tensors, **options), binary=binary)
    await client.open()
    return client


async def test_a_request_in_json() -> None:
    client = await infer_client(extra={"id": "7", "parameters": {"priority": 1}})
    request = client.request(CALL)
    body: Any = body_of(request)
    assert request.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\n")
    assert (body["id"], body["parameters"]) == ("7", {"priority": 1})
    assert [(each["name"], each["shape"], each["datatype"]) for each in body["inputs"]] == [
        ("X", [1, 2], "FP32"),
        ("Z", [1], "BYTES"),
    ]
    assert [len(each["data"]) for each in body["inputs"]] == [2, 1]
    assert client.request(CALL) is request


async def test_a_binary_request_is_that_of_tritons_client() -> None:
    client = await infer_client(binary=True)
    head, _, body = client.request(CALL).partition(b"\r\n\r\n")
    size = int(head.decode().split("Inference-Header-Content-Length: ")[1].split("\r\n")[0])
    inputs = []
    for name, datatype, raw in (("X", "FP32", body[size : size + 8]), ("Z", "BYTES", body[size + 8 :])):
        values: Any = np.frombuffer(raw, "<f4").reshape(1, 2) if datatype == "FP32" else np.array([raw[4:]], np.object_)
        inputs.append(triton.InferInput(name, list(values.shape), datatype))
        inputs[-1].set_data_from_numpy(values)
    expected, expected_size = triton.InferenceServerClient.generate_request_body(inputs)
    assert body[size:] == expected[expected_size:]
    ours, theirs = msgspec.json.decode(body[:size]), msgspec.json.decode(expected[:expected_size])
    assert ours == theirs


@pytest.mark.parametrize(
    "outputs",
    [
        [FP32 | {"data": [1.0, 2.0]}],
        [FP32 | {"data": [[1.0, 2.0]]}],
        [FP32 | {"shape": [0], "data": []}],
        [{"name": "Y", "datatype": "BYTES", "shape": [2], "data": ["a,b", "c"]}],
    ],
)
@pytest.mark.parametrize("binary", [False, True])
async def test_answers_in_json(outputs: Any, binary: bool) -> None:
    answer = await answered(await infer_client(binary=binary), [whole(encoded(model_name="m", outputs=outputs))])
    assert (answer.error, answer.output_tokens, answer.arrivals) == ("", 0, [])


def binary_answer(*sizes: int, short: int = 0, **fields: Any) -> bytes:
    outputs = [FP32 | {"parameters": {"binary_data_size": size}} | fields for size in sizes]
    text = encoded(outputs=outputs)
    length = f"inference-header-content-length: {len(text)}\r\n"
    return whole(text + b"\0" * (sum(sizes) - short), fields=length)


async def test_binary_answers() -> None:
    client = await infer_client(binary=True)
    assert (await answered(client, [binary_answer(8)])).error == ""
    assert (await answered(client, [binary_answer(8, 8)])).error == ""
    assert (await answered(client, [binary_answer(11, datatype="BYTES")])).error == ""
    raw = binary_answer(8, 8)
    assert (await answered(client, [raw[:-3], raw[-3:]])).ended == 2.0


@pytest.mark.parametrize(
    "raw",
    [
        whole(b""),
        whole(b"{}"),
        whole(encoded(outputs=[])),
        whole(encoded(error="x")),
        whole(encoded(outputs=[FP32])),
        whole(encoded(outputs=[FP32 | {"data": [1.0]}])),
        whole(encoded(outputs=[FP32 | {"data": []}])),
        whole(encoded(outputs=[FP32 | {"datatype": "BYTES"}])),
        binary_answer(8, short=1),
        binary_answer(8, short=-1),
        binary_answer(4),
        whole(encoded(outputs=[FP32 | {"parameters": {"binary_data_size": -8}}])),
        whole(
            encoded(outputs=[FP32 | {"parameters": {"binary_data_size": 0}}]).replace(b":0}", b":" + b"9" * 400 + b"}")
        ),
        whole(b"{}", fields="Inference-Header-Content-Length: x\r\n"),
    ],
)
async def test_answers_that_lack_something(raw: bytes) -> None:
    answer = await answered(await infer_client(binary=True), [raw])
    assert answer.error == MALFORMED
    assert answer.detail


async def test_metadata_are_asked_for_once() -> None:
    reply = whole(encoded(inputs=[{"name": "IN/1", "datatype": "FP32", "shape": ["-1", "2"]}]))
    async with raw_server(reply) as server:
        options = msgspec.structs.replace(OPTIONS, url=server.url, model="a/b", batch_size=3, headers={"X-Key": "k"})
        client = InferClient(options, binary=False)
        await client.open()
    body: Any = body_of(client.request(CALL))
    assert body["inputs"][0]["shape"] == [3, 2]
    assert server.requests[0].startswith(b"GET /v2/models/a%2Fb HTTP/1.1\r\n")
    assert b"\r\nX-Key: k\r\n" in server.requests[0]


async def generate_client(*names: str, **options: Any) -> GenerateClient:
    async with raw_server(metadata(*names)) as server:
        client = GenerateClient(msgspec.structs.replace(OPTIONS, **{"url": server.url} | options))
        await client.open()
    return client


async def test_a_model_of_tritons_vllm_backend() -> None:
    client = await generate_client(*VLLM, extra={"sampling_parameters": {"temperature": 0}, "id": "x"})
    request = client.request(CALL)
    body: Any = body_of(request)
    assert request.startswith(b"POST /v2/models/m/generate_stream HTTP/1.1\r\n")
    assert msgspec.json.decode(body.pop("sampling_parameters")) == {
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
    }
    flags = {"stream": True, "exclude_input_in_output": True, "return_num_output_tokens": True}
    assert body == {"text_input": "hello", "id": "x"} | flags


async def test_a_model_of_tritons_tensorrt_llm_backend() -> None:
    client = await generate_client(*TRTLLM, stream=False, ignore_eos=False, extra={"temperature": 0.5})
    request = client.request(CALL)
    assert request.startswith(b"POST /v2/models/m/generate HTTP/1.1\r\n")
    assert body_of(request) == {
        "text_input": "hello",
        "stream": False,
        "max_tokens": 4,
        "bad_words": "",
        "stop_words": "",
        "temperature": 0.5,
    }
    with pytest.raises(LoadTestError, match="ignore-eos"):
        await generate_client(*TRTLLM)


async def test_models_and_prompts_that_cannot_be() -> None:
    with pytest.raises(LoadTestError, match="text_input"):
        await generate_client("INPUT0")
    with pytest.raises(LoadTestError, match="sampling_parameters"):
        await generate_client(*VLLM, extra={"sampling_parameters": "x"})
    client = await generate_client(*VLLM)
    with pytest.raises(LoadTestError, match="text"):
        client.request(msgspec.structs.replace(CALL, prompt=[1, 2]))


async def generated(*events: bytes, **options: Any) -> Answer:
    client = await generate_client(*VLLM, **options)
    return await answered(client, [CHUNKED_HEAD, *map(chunk, events), LAST_CHUNK])


async def test_a_stream_with_counts() -> None:
    answer = await generated(
        event(text_output="a", num_output_tokens=1, num_input_tokens=9),
        event(text_output="", num_output_tokens=0),
        event(text_output=["b", "c"], num_output_tokens=[2, 1]),
        event(text_output="", num_output_tokens=1),
        keep_text=True,
    )
    assert (answer.error, answer.arrivals, answer.pieces) == ("", [2.0, 4.0, 5.0], [1, 3, 1])
    assert (answer.output_tokens, answer.prompt_tokens, answer.text) == (5, 9, "abc")


async def test_a_stream_without_counts() -> None:
    answer = await generated(event(text_output="a"), event(text_output=""), event(text_output="b"))
    assert (answer.error, answer.arrivals, answer.pieces) == ("", [2.0, 4.0], [])
    assert (answer.output_tokens, answer.text) == (None, None)


async def test_streams_that_fail() -> None:
    answer = await generated(event(text_output="a"), event(error="died"))
    assert (answer.error, answer.arrivals) == (STREAM_ERROR, [2.0])
    assert "died" in answer.detail
    assert (await generated()).error == TRUNCATED
    assert (await generated(b"data: x\n\n")).error == MALFORMED
    assert (await generated(event(choices=[]), event(num_output_tokens=3))).error == MALFORMED
    assert (await generated(event(id="x"), event(text_output="a"))).error == ""
    client = await generate_client(*VLLM)
    raw = chunked(event(text_output="a"), event(text_output="b"))
    for at in range(1, len(raw)):
        assert (await answered(client, [raw[:at]], lost=True)).error == TRUNCATED


@pytest.mark.parametrize("line", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_that_only_its_connection_ends(line: bytes) -> None:
    """Nothing but the end of the last event tells that it is whole."""
    head = CHUNKED_HEAD.replace(b"Transfer-Encoding: chunked", b"Connection: close")
    events = [event(text_output=text).replace(b"\n", line) for text in "ab"]
    client = await generate_client(*VLLM)
    assert (await answered(client, [head + b"".join(events)], lost=True)).error == ""
    for at in range(1, len(events[1])):
        answer = await answered(client, [head + events[0] + events[1][:at]], lost=True)
        assert (answer.error, answer.detail) == (TRUNCATED, "the stream ended within an event")


async def test_a_whole_answer_of_generate() -> None:
    client = await generate_client(*VLLM, stream=False, keep_text=True)
    answer = await answered(client, [whole(encoded(text_output="ab", num_output_tokens=4))])
    assert (answer.error, answer.arrivals, answer.pieces, answer.text) == ("", [], [], "ab")
    assert (await answered(client, [whole(encoded(error="x"))])).error == MALFORMED
    assert (await answered(client, [whole(encoded(num_output_tokens=4))])).error == MALFORMED
