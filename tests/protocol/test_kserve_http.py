"""tritonclient.http, and what perf tools ask, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from penstock.classic.tensors import NUMPY_TYPES
from penstock.engines.errors import QueueFullError
from support.kserve import FakeModelStore, add_sub, identity, repeat
from support.kserve_http import KServeServer


def models() -> FakeModelStore:
    found = [add_sub(), add_sub(version=2), repeat(), identity("FP32", [2], "batched", max_batch_size=8)]
    found += [identity(datatype) for datatype in NUMPY_TYPES]
    found += [identity("FP32", [-1, 2**10], "wide")]
    return FakeModelStore(*found)


@pytest.fixture(scope="module")
def server() -> Iterator[KServeServer]:
    with KServeServer(models(), allow_shared_memory=True, version="1.2.3") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: KServeServer) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.address, concurrency=4)
    yield client
    client.close()


def inputs(binary: bool) -> list[triton.InferInput]:
    found = []
    for index in (0, 1):
        given = triton.InferInput(f"INPUT{index}", [16], "FP32")
        given.set_data_from_numpy(np.arange(16, dtype=np.float32) * (index + 1), binary_data=binary)
        found.append(given)
    return found


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert client.is_model_ready("add_sub", "2")
    assert not client.is_model_ready("add_sub", "3")
    assert not client.is_model_ready("zz")
    assert client.get_server_metadata()["version"] == "1.2.3"
    assert client.get_model_metadata("add_sub")["versions"] == ["1", "2"]
    assert client.get_model_metadata("batched")["inputs"][0]["shape"] == [-1, 2]
    assert client.get_model_config("add_sub")["backend"] == "python"
    assert [each["version"] for each in client.get_inference_statistics("add_sub")["model_stats"]] == ["1", "2"]
    assert len(client.get_inference_statistics()["model_stats"]) > 10


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_add_sub(client: triton.InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    wanted = [triton.InferRequestedOutput("OUTPUT1", binary_data=binary_out)]
    result = client.infer("add_sub", inputs(binary_in), outputs=wanted, request_id="mine")
    assert result.as_numpy("OUTPUT1").tolist() == (-np.arange(16)).tolist()
    assert result.as_numpy("OUTPUT0") is None
    assert result.get_response()["id"] == "mine"
    assert result.get_response()["model_version"] == "2"


def test_without_requested_outputs_all_come_in_binary(client: triton.InferenceServerClient) -> None:
    result = client.infer("add_sub", inputs(True), model_version="1")
    assert result.as_numpy("OUTPUT0").tolist() == (3 * np.arange(16)).tolist()
    assert result.get_response()["model_version"] == "1"
    assert "binary_data_size" in result.get_output("OUTPUT1")["parameters"]


def values(datatype: str) -> Any:
    if datatype == "BYTES":
        return np.array([b"abc\0def", b"", "ä".encode(), b"\xff"], np.object_)
    if datatype == "BOOL":
        return np.array([True, False])
    return np.array([0, 1, 100], NUMPY_TYPES[datatype])


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_every_datatype_in_binary(client: triton.InferenceServerClient, datatype: str) -> None:
    array = values(datatype)
    given = triton.InferInput("INPUT0", list(array.shape), datatype)
    given.set_data_from_numpy(array)
    result = client.infer(f"identity_{datatype.lower()}", [given])
    assert result.as_numpy("OUTPUT0").tolist() == array.tolist()


@pytest.mark.parametrize("datatype", sorted(NUMPY_TYPES.keys() - {"FP16", "BF16"}))
def test_every_datatype_in_json(client: triton.InferenceServerClient, datatype: str) -> None:
    array = values(datatype)[:3]
    given = triton.InferInput("INPUT0", list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=False)
    wanted = [triton.InferRequestedOutput("OUTPUT0", binary_data=False)]
    found = client.infer(f"identity_{datatype.lower()}", [given], outputs=wanted).as_numpy("OUTPUT0").tolist()
    assert [value.encode() if isinstance(value, str) else value for value in found] == array.tolist()


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_in_json(server: KServeServer, datatype: str) -> None:
    body = {"inputs": [{"name": "INPUT0", "shape": [2], "datatype": datatype, "data": [0.5, -2]}]}
    answer = server.post(f"/v2/models/identity_{datatype.lower()}/infer", body)
    assert answer.json()["outputs"][0]["data"] == [0.5, -2.0]
    assert answer.json()["outputs"][0]["datatype"] == datatype


def test_nan_and_infinity_travel_in_binary_and_are_null_in_json(client: triton.InferenceServerClient) -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    given = triton.InferInput("INPUT0", [4], "FP32")
    given.set_data_from_numpy(array)
    np.testing.assert_array_equal(client.infer("identity_fp32", [given]).as_numpy("OUTPUT0"), array)
    wanted = [triton.InferRequestedOutput("OUTPUT0", binary_data=False)]
    found = client.infer("identity_fp32", [given], outputs=wanted).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(found, np.array([np.nan, np.nan, np.nan, 1], np.float32))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_get_compressed_answers_with_the_same_values(
    client: triton.InferenceServerClient, algorithm: str
) -> None:
    array = np.ones((4, 2**10), np.float32)
    given = triton.InferInput("INPUT0", [4, 2**10], "FP32")
    given.set_data_from_numpy(array)
    result = client.infer(
        "wide", [given], request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
    )
    assert np.array_equal(result.as_numpy("OUTPUT0"), array)


def test_a_large_tensor(client: triton.InferenceServerClient) -> None:
    array = np.random.default_rng(7).random((2**10, 2**10), np.float32)
    given = triton.InferInput("INPUT0", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    assert np.array_equal(client.infer("wide", [given]).as_numpy("OUTPUT0"), array)


def test_classification(client: triton.InferenceServerClient) -> None:
    given = triton.InferInput("INPUT0", [2, 2], "FP32")
    given.set_data_from_numpy(np.array([[1, 2], [4, 3]], np.float32))
    wanted = [triton.InferRequestedOutput("OUTPUT0", class_count=1)]
    found = client.infer("batched", [given], outputs=wanted).as_numpy("OUTPUT0")
    assert found.tolist() == [[b"2.000000:1"], [b"4.000000:0"]]


def test_parameters_and_sequences(client: triton.InferenceServerClient, server: KServeServer) -> None:
    client.infer(
        "add_sub",
        inputs(True),
        sequence_id="chat",
        sequence_start=True,
        priority=3,
        timeout=7000,
        parameters={"mine": "x", "count": 3, "flag": True},
    )
    request = server.store.model("add_sub").requests[-1]
    assert (request.correlation_id, request.sequence_start, request.sequence_end) == ("chat", True, False)
    assert (request.priority, request.timeout_us) == (3, 7000)
    assert request.parameters == {"mine": "x", "count": 3, "flag": True}


def test_shared_memory(client: triton.InferenceServerClient) -> None:
    memory = SharedMemory(create=True, size=256)
    try:
        memory.buf[:64] = np.arange(16, dtype=np.float32).tobytes()
        client.register_system_shared_memory("region", memory.name, 256)
        first = triton.InferInput("INPUT0", [16], "FP32")
        first.set_shared_memory("region", 64)
        wanted = triton.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("region", 64, offset=128)
        result = client.infer("add_sub", [first, inputs(True)[1]], outputs=[wanted])
        assert result.get_output("OUTPUT0") == {"name": "OUTPUT0", "datatype": "FP32", "shape": [16]}
        written = np.frombuffer(bytes(memory.buf[128:192]), np.float32)
        assert written.tolist() == (3 * np.arange(16)).tolist()
        wanted.set_shared_memory("region", 60, offset=128)
        with pytest.raises(InferenceServerException, match="should be at least 64 bytes"):
            client.infer("add_sub", [first, inputs(True)[1]], outputs=[wanted])
    finally:
        client.unregister_system_shared_memory("region")
        memory.close()
        memory.unlink()


def test_errors_reach_the_client(client: triton.InferenceServerClient, server: KServeServer) -> None:
    def refused(model: str, given: list[triton.InferInput], **options: Any) -> str:
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, given, **options)
        return str(caught.value)

    assert "[404] Request for unknown model: 'zz' is not found" in refused("zz", inputs(True))
    assert "[404]" in refused("add_sub", inputs(True), model_version="9")
    assert "expected 2 inputs but got 1 inputs for model 'add_sub'" in refused("add_sub", inputs(True)[:1])
    wanted = [triton.InferRequestedOutput("NOPE")]
    assert "unexpected inference output 'NOPE' for model 'add_sub'" in refused("add_sub", inputs(True), outputs=wanted)
    number = triton.InferInput("IN", [1], "INT32")
    number.set_data_from_numpy(np.array([1], np.int32))
    assert "[501] HTTP end point doesn't support models with decoupled" in refused("repeat", [number])
    model = server.store.model("add_sub")
    model.error = QueueFullError("Exceeds maximum queue size")
    try:
        assert "[503] Exceeds maximum queue size" in refused("add_sub", inputs(True))
    finally:
        model.error = None


def test_connections_are_kept_and_shared(client: triton.InferenceServerClient) -> None:
    running = [client.async_infer("add_sub", inputs(True)) for _ in range(64)]
    results = [each.get_result() for each in running]
    assert all(result.as_numpy("OUTPUT0").tolist() == (3 * np.arange(16)).tolist() for result in results)


def test_raw_bodies(server: KServeServer) -> None:
    array = np.arange(5, dtype=ml_dtypes.bfloat16)
    length = {"Inference-Header-Content-Length": "0"}
    answer = server.post("/v2/models/identity_bf16/infer", array.tobytes(), length)
    head = int(answer.headers["inference-header-content-length"])
    assert answer.body[head:] == array.tobytes()
    answer = server.post("/v2/models/identity_bytes/infer", b"text", length)
    assert answer.status == 200
    assert answer.body.endswith(b"\x04\0\0\0text")


async def test_a_client_that_hangs_up_is_noticed(server: KServeServer) -> None:
    model = server.store.model("identity_int8")
    body = b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"INT8","data":[1]}]}'

    async def hold() -> None:
        model.gate = asyncio.Event()

    server.do(hold())
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v2/models/identity_int8/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        await asyncio.to_thread(server.do, model.waiting.wait())
        writer.close()
        await asyncio.to_thread(server.do, model.cancelled.wait())
    finally:
        model.gate = None
