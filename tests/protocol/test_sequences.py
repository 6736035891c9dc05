"""Sequences on a real server, with Triton's own clients. What Triton answers is compared in tests/differential/."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from support.sequences import write_repository
from support.server import Server, serving, wait_until

SUMS = ["sequence_direct", "sequence_oldest", "onnx_sums"]
BASE = {"onnx_sums": 100}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("repository")
    write_repository(folder)
    with serving("--model-repository", str(folder), "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


class Client:
    """Asks over one of the two protocols; `ask` gives one output's first row."""

    def __init__(self, server: Server, protocol: str) -> None:
        self.module: Any = triton_http if protocol == "http" else triton_grpc
        address = server.url.removeprefix("http://") if protocol == "http" else server.grpc
        self.client = self.module.InferenceServerClient(address)

    def ask(
        self, model: str, value: int | str, id: int | str, start: bool = False, end: bool = False, output: str = "SUM"
    ) -> Any:
        if isinstance(value, str):
            array, datatype = np.array([[value.encode()]], np.object_), "BYTES"
        else:
            array, datatype = np.array([[value]], np.int32), "INT32"
        given = self.module.InferInput("INPUT", list(array.shape), datatype)
        given.set_data_from_numpy(array)
        answer = self.client.infer(
            model,
            [given],
            sequence_id=id,
            sequence_start=start,
            sequence_end=end,
            outputs=[self.module.InferRequestedOutput(output)],
        )
        return answer.as_numpy(output)[0].tolist()


@pytest.fixture(params=["http", "grpc"])
def client(server: Server, request: pytest.FixtureRequest) -> Client:
    return Client(server, request.param)


@pytest.mark.parametrize("model", SUMS)
def test_sums_of_sequences_beside_each_other(client: Client, model: str) -> None:
    base = BASE.get(model, 0)
    found = [
        client.ask(model, 1, 1, start=True),
        client.ask(model, 10, 2, start=True),
        client.ask(model, 2, 1),
        client.ask(model, 20, 2, end=True),
        client.ask(model, 3, 1, end=True),
    ]
    assert found == [[base + value] for value in (1, 10, 3, 30, 6)]


@pytest.mark.parametrize("model", SUMS)
def test_what_is_no_part_of_a_sequence_is_told_in_triton_s_words(client: Client, model: str) -> None:
    with pytest.raises(Exception, match=f"for sequence 77 to model '{model}' must specify the START flag on the first"):
        client.ask(model, 1, 77)
    with pytest.raises(Exception, match="must specify a non-zero or non-empty correlation ID"):
        client.ask(model, 1, 0, start=True)


@pytest.mark.parametrize("model", SUMS)
def test_many_sequences_at_the_same_time(server: Server, model: str) -> None:
    """More than there are slots: none sees another's sum."""
    base = BASE.get(model, 0)

    def whole(id: int) -> list[Any]:
        client = Client(server, "grpc")
        return [client.ask(model, id, id, start=n == 0, end=n == 4)[0] for n in range(5)]

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(whole, range(101, 113)))
    assert found == [[base + id * n for n in range(1, 6)] for id in range(101, 113)]


def test_json_and_generate(server: Server) -> None:
    tensor = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [4]}
    flags: dict[str, Any] = {"sequence_id": "json", "sequence_start": True}
    first = server.post("/v2/models/sequence_oldest/infer", {"inputs": [tensor], "parameters": flags})
    assert first.json()["outputs"][0]["data"] == [4]
    second = server.post("/v2/models/sequence_oldest/generate", {"INPUT": 5, "sequence_id": "json"})
    assert second.json()["SUM"] == 9
    last = {"INPUT": 6, "parameters": {"sequence_id": "json", "sequence_end": True}}
    assert server.post("/v2/models/sequence_oldest/generate", last).json()["SUM"] == 15
    refused = server.post("/v2/models/sequence_oldest/generate", {"INPUT": 5, "sequence_id": "json"})
    assert (refused.status_code, "START flag" in refused.json()["error"]) == (400, True)
    two = {"name": "INPUT", "datatype": "INT32", "shape": [2, 1], "data": [4, 5]}
    refused = server.post("/v2/models/sequence_oldest/infer", {"inputs": [two], "parameters": flags})
    assert (refused.status_code, "must specify batch-size 1" in refused.json()["error"]) == (400, True)


def test_a_slot_without_a_request_is_not_ready(client: Client) -> None:
    """READY is an output of the ONNX model: the request's own, whatever stands in the other rows."""
    for id in (31, 33, 35):  # every second is on the other instance
        client.ask("onnx_sums", 1, id, start=True)
    assert client.ask("onnx_sums", 5, 35, output="READY") == [1]
    seen = client.ask("onnx_sums", 6, 35, end=True)
    assert seen == [112]
    assert [client.ask("onnx_sums", 1, id, end=True) for id in (31, 33)] == [[102], [102]]


def test_control_tensors_and_padding(client: Client) -> None:
    for id in (41, 42):
        client.ask("sequence_direct", 1, id, start=True)
    seen = json.loads(client.ask("sequence_direct", 2, 42, end=True, output="SEEN")[0])
    assert (seen["START"], seen["END"], seen["READY"], seen["CORRID"]) == (0, 2.5, True, 42)
    assert seen["ready"] == [False, True]
    client.ask("sequence_direct", 1, 41, end=True)


def test_state_that_grows(client: Client) -> None:
    found = [client.ask("onnx_lists", n, "grows", start=n == 1, end=n == 3, output="LIST") for n in (1, 2, 3)]
    assert found == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_state_of_different_lengths_in_one_batch(server: Server) -> None:
    def whole(length: int) -> Any:
        client = Client(server, "grpc")
        return [
            client.ask("onnx_lists", length, f"s{length}", n == 0, n == length - 1, output="LIST")
            for n in range(length)
        ][-1]

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(whole, range(1, 7))) == [[0, *[length] * length] for length in range(1, 7)]


def test_state_of_a_python_model(client: Client) -> None:
    assert client.ask("python_state", "a", "text", start=True, output="TEXT") == [b"a"]
    assert client.ask("python_state", "b", "text", output="ID_SEEN") == [b"text"]
    with pytest.raises(Exception, match="as asked"):
        client.ask("python_state", "fail", "text", output="TEXT")
    assert client.ask("python_state", "c", "text", end=True, output="TEXT") == [b"abc"]
    assert client.ask("python_state", "d", 5, start=True, end=True, output="TEXT") == [b"d"]
    # beside another sequence, whose slot is padded
    assert client.ask("python_state", "x", "first", start=True, output="TEXT") == [b"x"]
    assert client.ask("python_state", "y", "second", start=True, output="TEXT") == [b"y"]
    assert client.ask("python_state", "y", "second", end=True, output="TEXT") == [b"yy"]
    assert client.ask("python_state", "x", "first", end=True, output="TEXT") == [b"xx"]


def stream(server: Server, requests: list[tuple[str, int, dict[str, Any]]]) -> list[Any]:
    """All requests at once on one stream; the first value of each response, or its error."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for model, value, fields in requests:
            given = triton_grpc.InferInput("INPUT", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[value]], np.int32))
            client.async_stream_infer(model, [given], enable_empty_final_response=True, **fields)
        client.stop_stream()
    found: list[Any] = []
    while not answers.empty():
        answer = answers.get()
        if isinstance(answer, Exception):
            found.append(str(answer))
            continue
        name = "OUTPUT" if requests[0][0] == "sequence_iterative" else "SUM"
        array = answer.as_numpy(name)
        found.append("end" if array is None else int(array[0, 0]))
    return found


@pytest.mark.parametrize("model", SUMS)
def test_a_whole_sequence_on_one_stream(server: Server, model: str) -> None:
    steps = [(model, n, {"sequence_id": 7, "sequence_start": n == 1, "sequence_end": n == 20}) for n in range(1, 21)]
    base = BASE.get(model, 0)
    assert stream(server, steps) == [base + n * (n + 1) // 2 for n in range(1, 21)]


def test_no_request_of_a_stream_overtakes_a_larger_one(server: Server) -> None:
    """Large requests are decoded in a thread."""
    answers: queue.Queue[Any] = queue.Queue()
    texts = [b"x" * 3_000_000, b"a", b"b"]
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or len(result.as_numpy("TEXT")[0, 0])))
        for number, text in enumerate(texts):
            given = triton_grpc.InferInput("INPUT", [1, 1], "BYTES")
            given.set_data_from_numpy(np.array([[text]], np.object_))
            flags = {"sequence_start": number == 0, "sequence_end": number == 2}
            client.async_stream_infer("python_state", [given], sequence_id="large", **flags)
        client.stop_stream()
    assert [answers.get_nowait() for _ in texts] == [3_000_000, 3_000_001, 3_000_002]


def test_iterative_requests_are_executed_again_and_again(server: Server) -> None:
    before = statistics(server, "sequence_iterative")
    assert stream(server, [("sequence_iterative", 3, {})]) == [3, 2, 1, 0, "end"]
    found = stream(server, [("sequence_iterative", 5, {}) for _ in range(3)])
    assert sorted(found, key=str) == [*sorted([5, 4, 3, 2, 1, 0] * 3), "end", "end", "end"]
    after = statistics(server, "sequence_iterative")
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 4
    assert "fail" not in after["inference_stats"] or after["inference_stats"]["fail"]["count"] == 0


def test_iterative_requests_as_events(server: Server) -> None:
    answer = server.post("/v2/models/sequence_iterative/generate_stream", {"INPUT": 2})
    frames = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [frame["OUTPUT"] for frame in frames] == [2, 1, 0]


def test_a_client_that_leaves_ends_an_iterative_sequence(server: Server) -> None:
    before = statistics(server, "sequence_iterative")["execution_count"]
    with httpx.stream(
        "POST", server.url + "/v2/models/sequence_iterative/generate_stream", json={"INPUT": 10**9}
    ) as response:
        next(response.iter_lines())
    wait_until(lambda: statistics(server, "sequence_iterative")["inference_stats"]["fail"]["count"] > 0)
    assert statistics(server, "sequence_iterative")["execution_count"] > before
    settled = statistics(server, "sequence_iterative")["execution_count"]
    assert stream(server, [("sequence_iterative", 1, {})]) == [1, 0, "end"]
    assert statistics(server, "sequence_iterative")["execution_count"] <= settled + 3


def test_a_sequence_that_is_idle_ends(client: Client) -> None:
    """After a second, by the configuration of this model."""
    client.ask("sequence_oldest", 1, "idle", start=True)
    client.ask("sequence_oldest", 1, "second", start=True)
    # There are two slots: this is answered when one of them is free again.
    client.ask("sequence_oldest", 1, "third", start=True, end=True)
    with pytest.raises(Exception, match="must specify the START flag"):
        client.ask("sequence_oldest", 1, "idle")


def test_a_model_that_is_loaded_again_knows_no_sequences(server: Server, client: Client) -> None:
    client.ask("onnx_sums", 1, 51, start=True)
    client.client.unload_model("onnx_sums")
    wait_until(lambda: not client.client.is_model_ready("onnx_sums"))
    client.client.load_model("onnx_sums")
    with pytest.raises(Exception, match="must specify the START flag"):
        client.ask("onnx_sums", 1, 51)
    assert client.ask("onnx_sums", 1, 51, start=True, end=True) == [101]


def test_statistics_and_metrics_count_requests_and_the_whole_batch(server: Server) -> None:
    client = Client(server, "http")
    before = statistics(server, "sequence_direct")
    for id in (61, 62):
        client.ask("sequence_direct", 1, id, start=True)
    for id in (62, 61):
        client.ask("sequence_direct", 1, id, end=True)
    after = statistics(server, "sequence_direct")
    assert after["inference_count"] - before["inference_count"] == 4
    assert after["execution_count"] - before["execution_count"] == 4
    sizes = {each["batch_size"]: each["compute_infer"]["count"] for each in after["batch_stats"]}
    assert sizes[2] >= 2  # the second one's requests have a row of padding before them
    metrics = httpx.get(server.operator + "/metrics").text
    assert f'nv_inference_count{{model="sequence_direct",version="1"}} {after["inference_count"]}' in metrics


def statistics(server: Server, model: str) -> Any:
    return httpx.get(f"{server.url}/v2/models/{model}/stats").json()["model_stats"][0]


def test_the_server_says_that_it_has_sequences(client: Client) -> None:
    metadata = client.client.get_server_metadata()
    extensions = metadata["extensions"] if isinstance(metadata, dict) else list(metadata.extensions)
    assert "sequence" in extensions
