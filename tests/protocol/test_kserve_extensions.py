"""Triton's HTTP extensions with real clients over real connections: generate, shared memory, repository, settings."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.gateway.apis.kserve.parameters import forward_pattern
from penstock.gateway.requests.load_report import LoadReport, LoadReporter
from penstock.gateway.transports.http.settings import AppSettings
from support.kserve import FakeModel, FakeModelStore, add_sub, identity, repeat, tensor_config
from support.kserve_http import KServeServer


def texts() -> FakeModel:
    """Decoupled: answers `text_input` by what the test puts into `script`."""
    return FakeModel(
        'name: "llm" backend: "python" model_transaction_policy { decoupled: true } '
        f"input {tensor_config('text_input', 'BYTES', [1])} output {tensor_config('text_output', 'BYTES', [1])}",
        lambda request: [],
    )


def text(value: bytes, *, final: bool = False) -> InferResponse:
    array = np.empty(1, np.object_)
    array[0] = value
    return InferResponse([Tensor("text_output", "BYTES", array)], final=final)


@pytest.fixture(scope="module")
def server() -> Iterator[KServeServer]:
    models = [add_sub(), repeat(), texts(), identity("FP32", [2], "typ", max_batch_size=8)]
    options: dict[str, Any] = {
        "allow_shared_memory": True,
        "header_forward_pattern": forward_pattern("x-fwd-.*"),
    }
    report = LoadReport(named_metrics={"kv_cache_utilization": 0.5, "max_token_capacity": 1024.0})
    settings = AppSettings(load=LoadReporter(lambda: report))
    with KServeServer(FakeModelStore(*models), settings, **options) as server:
        yield server


@pytest.fixture
def client(server: KServeServer) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.address)
    yield client
    client.close()


@pytest.fixture
def llm(server: KServeServer) -> FakeModel:
    return server.store.by_name["llm"][1]


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_generate_answers_in_json_and_reports_its_load_if_asked(server: KServeServer) -> None:
    answer = server.post("/v2/models/typ/versions/1/generate", {"INPUT0": [1, 2], "id": "7"})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.body == b'{"OUTPUT0":[1.0,2.0],"id":"7","model_name":"typ","model_version":"1"}'
    report = {"endpoint-load-metrics-format": "text"}
    answer = server.post("/v2/models/typ/generate", {"INPUT0": [1, 2]}, report)
    assert answer.headers["endpoint-load-metrics"] == (
        "TEXT named_metrics.kv_cache_utilization=0.500000, named_metrics.max_token_capacity=1024"
    )


def test_generate_stream(server: KServeServer) -> None:
    with httpx.stream("POST", f"http://{server.address}/v2/models/repeat/generate_stream", json={"IN": 5}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["transfer-encoding"] == "chunked"
        found = answer.read().decode()
    expected = [f'data: {{"OUT":{index},"model_name":"repeat","model_version":"1"}}\n\n' for index in range(5)]
    assert found == "".join(expected)


def test_a_streaming_client_that_leaves_cancels_at_once(server: KServeServer, llm: FakeModel) -> None:
    async def gate() -> asyncio.Event:
        return asyncio.Event()

    never = server.do(gate())
    llm.script = lambda request: [text(b"a"), never]
    with httpx.stream("POST", f"http://{server.address}/v2/models/llm/generate_stream", json={"text_input": ""}) as got:
        frames = got.iter_text()
        assert next(frames).startswith("data: ")
        assert not llm.streams[-1].closed.is_set()
    until(llm.streams[-1].closed.is_set)


def test_a_client_that_does_not_read_is_waited_for(server: KServeServer, llm: FakeModel) -> None:
    """No more is asked of the model than the connection's buffers hold."""
    size, asked = 1 << 16, [0]

    def script(request: InferRequest) -> Iterable[InferResponse]:
        for _ in range(10_000):
            asked[0] += 1
            yield text(b"x" * size)

    llm.script = script
    body = b'{"text_input":"a"}'
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v2/models/llm/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        seen, still = -1, 0
        while still < 20:
            still = still + 1 if asked[0] == seen and seen else 0
            seen = asked[0]
            time.sleep(0.01)
        assert seen * size < 64 << 20
        assert not llm.streams[-1].closed.is_set()
        assert server.post("/v2/models/typ/generate", {"INPUT0": [1, 2]}).status == 200
    until(llm.streams[-1].closed.is_set)


def test_errors_of_generate(server: KServeServer) -> None:
    for path in ("generate", "generate_stream"):
        answer = server.post(f"/v2/models/nope/{path}", {"X": 1})
        assert (answer.status, answer.error) == (404, "Request for unknown model: 'nope' is not found")
        answer = server.post(f"/v2/models/typ/{path}", {"INPUT0": [1, 2, 3]})
        assert answer.status == 400
        assert answer.error == "The schema can not convert input 'INPUT0' to tensor with proper shape"
        assert server.get(f"/v2/models/typ/{path}").status == 405


def test_headers_reach_the_model(server: KServeServer, client: triton.InferenceServerClient) -> None:
    model = server.store.by_name["typ"][1]
    assert server.post("/v2/models/typ/generate", {"INPUT0": [1, 2]}, {"X-Fwd-A": "1", "X-No": "2"}).status == 200
    assert model.requests[-1].parameters == {"x-fwd-a": "1"}


def test_tensors_in_shared_memory(server: KServeServer, client: triton.InferenceServerClient) -> None:
    key = f"/test_{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("data", key, 256)
    try:
        given = np.arange(16, dtype=np.float32)
        shm.set_shared_memory_region(handle, [given, given])
        client.register_system_shared_memory("data", key, 256)
        assert client.get_system_shared_memory_status() == [{"name": "data", "key": key, "offset": 0, "byte_size": 256}]
        inputs = [triton.InferInput(f"INPUT{index}", [16], "FP32") for index in (0, 1)]
        inputs[0].set_shared_memory("data", 64)
        inputs[1].set_shared_memory("data", 64, 64)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("data", 64, 128)
        client.infer("add_sub", inputs, outputs=[output])
        assert shm.get_contents_as_numpy(handle, np.float32, [16], 128).tolist() == (given * 2).tolist()
        output.set_shared_memory("data", 32, 128)
        with pytest.raises(InferenceServerException, match="shared memory"):
            client.infer("add_sub", inputs, outputs=[output])
        inputs[1].set_shared_memory("data", 64, 224)
        with pytest.raises(InferenceServerException, match="Invalid offset \\+ byte size"):
            client.infer("add_sub", inputs)
        client.unregister_system_shared_memory("data")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'data'"):
            client.infer("add_sub", inputs)
        assert client.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(handle)


def test_shared_memory_that_is_not_there(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region: '/nonexist'"):
        client.register_system_shared_memory("r", "/nonexist", 64)
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'r'"):
        client.get_system_shared_memory_status("r")
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported"):
        client.register_cuda_shared_memory("r", base64.b64encode(bytes(64)), 0, 64)
    client.unregister_cuda_shared_memory()


def test_trace_settings(client: triton.InferenceServerClient) -> None:
    updated = client.update_trace_settings("add_sub", {"trace_level": ["TIMESTAMPS"], "trace_rate": "7"})
    assert (updated["trace_level"], updated["trace_rate"], updated["trace_count"]) == (["TIMESTAMPS"], "7", "-1")
    assert client.get_trace_settings("add_sub") == updated
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    cleared = client.update_trace_settings("add_sub", {"trace_level": None, "trace_rate": None})
    assert cleared == client.get_trace_settings()
    with pytest.raises(InferenceServerException, match="trace file location can not be updated"):
        client.update_trace_settings(settings={"trace_file": "/tmp/x"})
    with pytest.raises(InferenceServerException, match="Request for unknown model : nope"):
        client.get_trace_settings("nope")


def test_log_settings(client: triton.InferenceServerClient) -> None:
    before = client.get_log_settings()
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.update_log_settings({"log_verbose_level": before["log_verbose_level"]}) == before
    with pytest.raises(InferenceServerException, match="log file location can not be updated"):
        client.update_log_settings({"log_file": "/tmp/x"})


def test_the_repository(server: KServeServer, client: triton.InferenceServerClient) -> None:
    found = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert found["add_sub"] == {"name": "add_sub", "version": "1", "state": "READY"}
    client.load_model("m", config='{"backend":"identity"}', files={"file:1/model.bin": b"\0\xff"})
    assert server.store.loads[-1] == ("m", '{"backend":"identity"}', {"1/model.bin": b"\0\xff"})
    client.unload_model("m", unload_dependents=True)
    assert server.store.unloads[-1] == ("m", True)
    answer = server.post("/v2/repository/other/models/m/load", b"")
    assert (answer.status, answer.error) == (501, "'repository_name' specification is not supported")
    parameters = {"parameters": {"file:1/x": base64.b64encode(b"x").decode(), "nope": "1"}}
    answer = server.post("/v2/repository/models/m/load", parameters)
    assert (answer.status, answer.error) == (400, "unrecognized load parameter 'nope'")


def test_deep_and_wide_bodies_leave_the_server_alive(server: KServeServer) -> None:
    deep = b'{"ready":' + b"[" * 250_000
    wide = json.dumps({f"k{index}": index for index in range(20_000)}).encode()
    register = "systemsharedmemory/region/r/register"
    for path in ("repository/index", "trace/setting", "logging", register):
        for body, error in (
            (deep, "nests deeper than 100 levels"),
            (wide, "no 'key' field" if path == register else "'k0'"),
            (b"[]", "expected `object`, got `array`"),
            (b"{", "is not valid JSON"),
            (b"\xff\xfe", "is not valid UTF-8"),
        ):
            answer = server.post(f"/v2/{path}", body)
            assert answer.status == 400
            assert error in answer.error
    answer = server.post("/v2/models/typ/generate", deep)
    assert (answer.status, answer.error) == (400, "The request body nests deeper than 100 levels.")
    assert server.get("/v2/health/live").status == 200
