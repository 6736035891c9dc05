"""Models of several backends in one repository, asked with tritonclient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from backend_candidates import candidate
from backend_candidates.candidate import beyond_the_table, lookup_answer, lookup_rows
from support.server import Server, serving
from support.tritonclient import infer_inputs

MODELS = {"script": "pytorch", "ir": "openvino", "graph": "openvino.ONNX", "file": "backend_file"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Configurations say as little as they may."""
    folder = tmp_path_factory.mktemp("models")
    for name, key in MODELS.items():
        found = candidate(key)
        found.write(folder / name / "1", 2)
        config = found.config if found.sparse is None else found.sparse
        (folder / name / "config.pbtxt").write_text(f'backend: "{found.backend}"\n{config}')
    with serving("--model-repository", str(folder)) as running:
        running.wait_for_log("ready: 4 models")
        yield running


@pytest.mark.parametrize("name", MODELS)
def test_tritonclient_gets_its_answers(server: Server, name: str) -> None:
    rows = lookup_rows(np.random.default_rng(0), 3)
    clients: list[tuple[Any, Any]] = [
        (triton_http, triton_http.InferenceServerClient(server.url.removeprefix("http://"))),
        (triton_grpc, triton_grpc.InferenceServerClient(server.grpc)),
    ]
    for module, client in clients:
        found = client.infer(name, infer_inputs(module, **rows))
        for output, array in lookup_answer(rows, 2).items():
            np.testing.assert_allclose(found.as_numpy(output), array, rtol=1e-6)
        client.close()


@pytest.mark.parametrize("name", ["script", "ir"])
def test_what_fails_for_its_data_is_the_caller_s_error(server: Server, name: str) -> None:
    client = triton_http.InferenceServerClient(server.url.removeprefix("http://"))
    with pytest.raises(triton_http.InferenceServerException) as told:
        client.infer(name, infer_inputs(triton_http, **beyond_the_table()))
    assert told.value.status() == "400"
    client.close()
