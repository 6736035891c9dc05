"""The RAG example on a real server, with Triton's own clients: an ensemble of Python models and a language model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from support.server import Server, serving, wait_until

RAG = Path(__file__).parents[2] / "examples" / "rag"
ASKER = """
import triton_python_backend_utils as pb_utils
import numpy as np

def text(name, value): return pb_utils.Tensor(name, np.array([value], np.object_))

def request(model, output, *inputs):
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=[output], inputs=list(inputs))

def shown(response):
    if response.has_error(): return "error " + response.error().message()
    return b"".join(b"".join(t.as_numpy()) for t in response.output_tensors()).decode()

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            [question] = r.inputs()[0].as_numpy()
            streams = pb_utils.Tensor("stream", np.array([True]))
            exclude = pb_utils.Tensor("exclude_prompt", np.array([True]))
            whole = shown(request("rag", "answer", text("question", question), exclude).exec())
            pieces = request("rag", "answer", text("question", question), streams).exec(decoupled=True)
            pieces = [shown(piece) for piece in pieces]
            direct = shown(request("chat", "text_output", text("text_input", question)).exec())
            refused = shown(request("rag", "answer", text("question", question), streams).exec())
            found = [whole, "".join(pieces), str(len(pieces)), direct, refused]
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("FOUND", np.array([part.encode() for part in found], np.object_))]))
        return responses
"""
ASKER_CONFIG = """
backend: "python"
input { name: "QUESTION" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "FOUND" data_type: TYPE_STRING dims: [ -1 ] }
"""
QUESTION = "How do I copy a whole directory?"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("rag") / "models"
    shutil.copytree(RAG / "models", repository)
    (repository / "asker" / "1").mkdir(parents=True)
    (repository / "asker" / "1" / "model.py").write_text(ASKER)
    (repository / "asker" / "config.pbtxt").write_text(ASKER_CONFIG)
    tracing = [
        flag
        for pair in ("level=TIMESTAMPS", "rate=1", "triton,log-frequency=1", f"triton,file={traces}")
        for flag in ("--trace-config", pair)
    ]
    flags = ("--model-control-mode=explicit", "--load-model=rag", "--load-model=asker", *tracing)
    with serving("--model-repository", str(repository), *flags) as running:
        running.wait_for_log(r"ready: 5 models: asker 1, chat 1, embed 1, rag 1, retrieve 1")
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    found = triton_http.InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60)
    yield found
    found.close()


def tensor(name: str, value: object) -> Any:
    datatype = "BOOL" if isinstance(value, bool) else "BYTES"
    made = triton_http.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], np.bool_ if datatype == "BOOL" else np.object_))
    return made


def test_the_example_streams_an_answer(server: Server, client: Any) -> None:
    command = [sys.executable, str(RAG / "ask.py"), "--url", server.grpc, QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    inputs = [tensor("question", QUESTION.encode()), tensor("exclude_prompt", True)]
    whole = client.infer("rag", inputs)
    assert [piece.decode() for piece in whole.as_numpy("answer")] == [done.stdout.removesuffix("\n")]
    prompted = client.infer("rag", inputs[:1]).as_numpy("answer")[0].decode()
    assert prompted.startswith("shutil.copytree: Recursively copy a directory tree")
    pieces = client.get_inference_statistics("chat")["model_stats"][0]["inference_stats"]["success"]["count"]
    assert (
        pieces == client.get_inference_statistics("rag")["model_stats"][0]["inference_stats"]["success"]["count"] == 3
    )


def test_what_the_server_says_of_an_ensemble(server: Server, client: Any) -> None:
    metadata = client.get_model_metadata("rag")
    assert (metadata["platform"], metadata["versions"]) == ("ensemble", ["1"])
    config = client.get_model_config("rag")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["embed", "retrieve", "chat"]
    with pytest.raises(InferenceServerException, match="in ensemble 'rag', a request that streams has many"):
        client.infer("rag", [tensor("question", b"x"), tensor("stream", True)])


def test_a_python_model_asks_ensembles_and_language_models(client: Any) -> None:
    found = client.infer("asker", [tensor("QUESTION", QUESTION.encode())]).as_numpy("FOUND")
    whole, pieces, count, direct, refused = [part.decode() for part in found]
    assert whole == pieces != ""
    assert int(count) >= 1  # how many: on a busy machine all steps may leave together
    assert direct.startswith(QUESTION)
    assert (
        refused == "error Model rag - Error when running inference: in ensemble 'rag', a request that streams has many "
        "responses; it needs a stream to carry them"
    )


def test_a_client_that_leaves_frees_the_language_model_behind_the_ensemble(server: Server) -> None:
    body = {"question": "x", "stream": True}
    with httpx.stream("POST", server.url + "/v2/models/rag/generate_stream", json=body, timeout=60) as response:
        assert next(response.iter_lines()).startswith('data: {"answer"')
    wait_until(server.is_idle)


def test_an_ensemble_goes_and_comes_back_with_its_models(server: Server, client: Any) -> None:
    client.unload_model("embed")
    assert not client.is_model_ready("rag")
    assert client.is_server_ready()
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'rag' has no available versions"):
        client.infer("rag", [tensor("question", b"x")])
    client.load_model("embed")
    assert client.is_model_ready("rag")
    assert client.infer("rag", [tensor("question", b"x")]).as_numpy("answer").shape == (1,)
    lines = httpx.get(server.operator + "/metrics").text.splitlines()
    assert 'nv_inference_request_failure{model="rag",reason="OTHER",version="1"} 0' in lines


def test_a_trace_has_one_of_its_own_for_each_step(server: Server, client: Any, traces: Path) -> None:
    client.infer("rag", [tensor("question", b"x")], request_id="traced")

    def outer() -> list[Any]:
        return [head for head in _heads(traces) if head.get("request_id") == "traced" and head["model_name"] == "rag"]

    wait_until(lambda: len(outer()) == 1)
    steps = [head["model_name"] for head in _heads(traces) if head.get("parent_id") == outer()[0]["id"]]
    assert steps == ["embed", "retrieve", "chat"]


def _heads(traces: Path) -> list[Any]:
    """What each trace is of. The file of one may be half written."""
    texts = [file.read_text() for file in traces.parent.iterdir()]
    events = [event for text in texts if text.endswith("]") for event in json.loads(text)]
    return sorted((event for event in events if "model_name" in event), key=lambda event: int(event["id"]))
