"""Ragged batches, custom batching and streams that share a batch on a real server, with Triton's own clients."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from support.ragged import write_sums
from support.server import Server, serving

MODELS = Path(__file__).parents[1] / "differential/models"
DOCS = Path(__file__).parents[2] / "docs/batching.md"
BY_BYTES = """
backend: "identity" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
parameters { key: "MAX_BATCH_VOLUME_BYTES" value { string_value: "48" } }
parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "rules/by_bytes.py" } }
dynamic_batching { max_queue_delay_microseconds: 30000000 }
"""
"""A batch goes when the next request does not fit; the test never waits for the delay."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("repository")
    write_sums(folder)
    shutil.copytree(MODELS / "repeat_batched", folder / "repeat_batched")
    (folder / "by_bytes/1").mkdir(parents=True)
    (folder / "by_bytes/config.pbtxt").write_text(BY_BYTES)
    (folder / "by_bytes/rules").mkdir()
    (folder / "by_bytes/rules/by_bytes.py").write_text(documented_class())
    with serving("--model-repository", str(folder)) as server:
        yield server


def documented_class() -> str:
    """The example of the documentation."""
    return DOCS.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]


def floats(*values: float) -> list[Any]:
    given = triton_http.InferInput("INPUT", [1, len(values)], "FP32")
    given.set_data_from_numpy(np.array([values], np.float32))
    return [given]


def batch_sizes(server: Server, model: str) -> list[int]:
    [found] = httpx.get(f"{server.url}/v2/models/{model}/stats").json()["model_stats"]
    return [each["batch_size"] for each in found["batch_stats"] for _ in range(each["compute_infer"]["count"])]


def test_requests_of_different_shapes_are_one_batch(server: Server) -> None:
    rows = [[1, 2, 3], [4], [5, 6], [7]]
    with triton_http.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as client:
        asked = [client.async_infer("sums", floats(*row)) for row in rows]
        answers = [each.get_result() for each in asked]
    assert [answer.as_numpy("DOUBLED").tolist() for answer in answers] == [
        [[2 * value for value in row]] for row in rows
    ]
    assert [answer.as_numpy("SUM").item() for answer in answers] == [6, 4, 11, 7]
    assert [answer.as_numpy("LONGEST").item() for answer in answers] == [3] * 4
    assert batch_sizes(server, "sums") == [4]


def test_the_strategy_of_the_documentation_bounds_bytes(server: Server) -> None:
    """Three requests of 16 bytes are a batch; one of 64 goes alone."""
    found: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.put(error or result.as_numpy("OUTPUT0").tolist()))
        rows = [[[n] * 4] for n in range(9)] + [[[9] * 4] * 4]
        for each in rows:
            given = triton_grpc.InferInput("INPUT0", [len(each), 4], "FP32")
            given.set_data_from_numpy(np.array(each, np.float32))
            client.async_stream_infer("by_bytes", [given])
        answers = [found.get(timeout=20) for _ in rows]
        client.stop_stream()
    assert sorted(answers) == rows
    assert sorted(batch_sizes(server, "by_bytes")) == [3, 3, 3, 4]


def test_one_of_three_streams_leaves(server: Server) -> None:
    """The three are executed together. The endless one is given up, the others come to their end."""
    found: queue.Queue[Any] = queue.Queue()
    clients = [triton_grpc.InferenceServerClient(server.grpc) for _ in range(3)]
    for number, client in zip((-1, 20, 30), clients, strict=True):
        client.start_stream(lambda result, error, number=number: found.put((number, result, error)))
        inputs = [triton_grpc.InferInput(name, [1, 1], "INT32") for name in ("N", "FAIL_AT")]
        for given, value in zip(inputs, (number, -1), strict=True):
            given.set_data_from_numpy(np.array([[value]], np.int32))
        client.async_stream_infer("repeat_batched", inputs, enable_empty_final_response=True)
    indices: dict[int, list[int]] = {-1: [], 20: [], 30: []}
    left = {20, 30}
    while left:
        number, result, error = found.get(timeout=20)
        if error is not None:
            assert (number, type(error)) == (-1, InferenceServerException)
        elif result.get_response().parameters["triton_final_response"].bool_param:
            left.discard(number)
        else:
            assert result.as_numpy("TOGETHER").item() == 3
            indices[number].append(result.as_numpy("INDEX").item())
            if number == -1 and len(indices[-1]) == 1:
                clients[0].stop_stream(cancel_requests=True)
    assert indices[20] == list(range(20))
    assert indices[30] == list(range(30))
    for client in clients:
        client.close()
