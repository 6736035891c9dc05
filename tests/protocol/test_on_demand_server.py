"""A server that loads its models on demand, with the clients of their users."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from penstock.gateway.requests.access import key_digest
from support.server import Server, serving

CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
parameters { key: "penstock_memory" value { string_value: "%s" } }
"""
DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() * 2)]) for r in requests]
"""
ASKER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            inputs = [pb_utils.Tensor("X", r.inputs()[0].as_numpy())]
            inner = pb_utils.InferenceRequest(model_name="small", requested_output_names=["Y"], inputs=inputs).exec()
            responses.append(pb_utils.InferenceResponse(inner.output_tensors(), inner.error()))
        return responses
"""
LIMIT = "330MiB"
KEYS = {
    "user": 'tenant = "user"',
    "admin": 'tenant = "boss"\nroles = ["inference", "metadata", "metrics", "admin"]',
    "looks": 'tenant = "looks"\nroles = ["metadata"]',
    "elsewhere": 'tenant = "elsewhere"\nmodels = ["other-*"]',
    "public": 'tenant = "public"\nmodels = ["public-*"]',
}
USER, ADMIN, ELSEWHERE, PUBLIC = (
    {"authorization": f"Bearer {key}"} for key in ("user", "admin", "elsewhere", "public")
)


EMPTY: dict[str, Any] = {"generate": {"response": ""}, "chat": {"message": {"role": "assistant", "content": ""}}}


def write_python(repository: Path, name: str, code: str, memory: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG % memory)
    (repository / name / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    write_python(repository, "small", DOUBLE, "50MiB")
    write_python(repository, "large", DOUBLE, "300MiB")
    write_python(repository, "huge", DOUBLE, "1GiB")
    write_python(repository, "asker", ASKER, "50MiB")
    (repository / "chat" / "1").mkdir(parents=True)
    (repository / "chat" / "config.pbtxt").write_text('backend: "penstock"\n')
    settings = {"model": "penstock-demo", "engine": "simulated"}
    (repository / "chat" / "1" / "model.json").write_text(json.dumps(settings))
    keys = repository / "keys.toml"
    keys.write_text(
        "".join(f'[[key]]\nsha256 = "{key_digest(key.encode()).hex()}"\n{rest}\n' for key, rest in KEYS.items())
    )
    flags = ("--model-control-mode", "explicit", "--load-on-demand", "--memory-limit", LIMIT)
    with serving("--model-repository", str(repository), *flags, "--api-key-file", str(keys)) as server:
        yield server


def loaded(server: Server) -> list[str]:
    index = httpx.post(server.url + "/v2/repository/index", json={"ready": True}, headers=USER).json()
    return [each["name"] for each in index]


def over_http(server: Server, name: str, key: str = "user") -> Any:
    tensor = triton_http.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    with triton_http.InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60) as client:
        found = client.infer(name, [tensor], headers={"authorization": f"Bearer {key}"})
    return found.as_numpy("Y").tolist()


def over_grpc(server: Server, name: str) -> Any:
    tensor = triton_grpc.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        assert client.is_model_ready(name, headers=USER), "as a client checks before it asks"
        assert client.get_model_metadata(name, headers=USER).inputs[0].name == "X"
        return client.infer(name, [tensor], headers=USER).as_numpy("Y").tolist()


def test_callers_without_the_right_load_nothing(server: Server) -> None:
    with pytest.raises(InferenceServerException):
        over_http(server, "small", "elsewhere")
    with pytest.raises(InferenceServerException):
        over_http(server, "small", "nobody")
    with pytest.raises(openai.OpenAIError):
        server.client("elsewhere").completions.create(model="chat", prompt="The cat", max_tokens=2)
    assert httpx.get(server.url + "/v2/models/small", headers={"authorization": "Bearer looks"}).status_code == 404
    assert loaded(server) == []


def test_clients_load_their_models_and_the_oldest_make_room(server: Server) -> None:
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda _: over_http(server, "small"), range(8))) == [[2, 4]] * 8
    assert loaded(server) == ["small"]
    server.wait_for_log("model 'small' is ready")
    assert sum("model 'small' is ready" in line for line in server.log) == 1
    client = server.client("user")
    [listed] = [each for each in client.models.list() if each.id == "chat"]
    assert listed.model_dump()["max_model_len"] is None
    found = client.completions.create(model="chat", prompt="The cat", max_tokens=4)
    assert found.usage is not None
    assert found.usage.completion_tokens > 0
    assert loaded(server) == ["chat", "small"]
    assert over_grpc(server, "large") == [2, 4]
    assert "chat" not in loaded(server)
    assert client.models.retrieve("chat").id == "chat"
    streamed = client.completions.create(model="chat", prompt="The cat", max_tokens=4, stream=True)
    assert sum(1 for _ in streamed) >= 1
    assert "large" not in loaded(server)
    metrics = httpx.get(server.operator + "/metrics").text
    assert 'penstock_model_demand_unloads_total{model="large",reason="room"} 1.0' in metrics
    assert 'penstock_model_demand_load_seconds_count{model="chat"} 2.0' in metrics


def test_ollama_s_keep_alive_unloads_a_model_that_requests_load(server: Server) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "The cat"}], "options": {"num_predict": 4}}
    whole = server.post("/api/chat", {**body, "stream": False, "keep_alive": "5m"}, headers=USER)
    assert (whole.status_code, whole.headers.get("x-penstock-ignored")) == (200, None)
    running = httpx.get(server.url + "/api/ps", headers=USER).json()["models"]
    assert [each["model"] for each in running] == ["chat"]
    left = datetime.fromisoformat(running[0]["expires_at"]).timestamp() - time.time()
    assert 200 < left < 400
    with httpx.stream("POST", server.url + "/api/chat", json={**body, "keep_alive": 0}, headers=ADMIN) as streamed:
        assert json.loads(list(streamed.iter_lines())[-1])["done_reason"] == "length"
    server.wait_for_log("model 'chat' is unloaded because nobody used it")
    assert "chat" not in loaded(server)
    pulled = server.post("/api/pull", {"model": "chat"}, headers=USER).text.splitlines()
    states = ["pulling manifest", "verifying sha256 digest", "writing manifest", "success"]
    assert [json.loads(line) for line in pulled] == [{"status": text} for text in states], "its size is not known"
    unloads = ({"keep_alive": 0}, {"keep_alive": "0"}, {"keep_alive": "0s", "prompt": ""}, {"keep_alive": 0.0})
    for unload in unloads:
        for path, empty in EMPTY.items():
            left_out = server.post(f"/api/{path}", {"model": "chat:latest", **unload}, headers=USER).json()
            assert left_out.pop("created_at")
            assert left_out == {"model": "chat:latest", **empty, "done": True, "done_reason": "unload"}
    assert "chat" not in loaded(server), "nothing is loaded to be unloaded"
    forbidden = server.post("/api/generate", {"model": "chat", "keep_alive": 0}, headers=ELSEWHERE)
    unknown = server.post("/api/generate", {"model": "chatter", "keep_alive": 0}, headers=USER)
    assert (forbidden.status_code, unknown.status_code) == (403, 404)
    assert server.post("/api/chat", body | {"stream": False}, headers=USER).status_code == 200
    assert "chat" in loaded(server), "the next request loads it again"


def test_a_model_asks_another_one_that_is_not_loaded(server: Server) -> None:
    httpx.post(server.url + "/v2/repository/models/small/unload", headers=ADMIN)
    with pytest.raises(InferenceServerException, match="Model 'small' is not ready"):
        over_http(server, "asker")
    httpx.post(server.url + "/v2/repository/models/small/load", headers=ADMIN)
    over_grpc(server, "large")
    assert over_http(server, "asker") == [2, 4]


def test_refusals_say_why_and_when_to_come_again(server: Server) -> None:
    before = loaded(server)
    body = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}]}
    for _ in range(2):
        refused = server.post("/v2/models/huge/infer", body, headers=USER)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "model 'huge' does not fit into memory: it needs 1.0 GiB" in refused.json()["error"]
    assert httpx.get(server.url + "/v2/models/huge/ready", headers=USER).status_code == 400
    assert server.post("/v2/models/nothing/infer", body, headers=USER).status_code == 404
    with triton_grpc.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException) as found:
        client.infer("huge", [triton_grpc.InferInput("X", [1], "FP32")], headers=USER)
    assert found.value.status() == "StatusCode.UNAVAILABLE"
    chat = server.post("/v1/chat/completions", {"model": "huge", "messages": []}, headers=USER)
    assert chat.status_code == 404, "it is no language model: nothing is tried"
    assert loaded(server) == before


def test_public_names_load_their_targets(server: Server) -> None:
    """Over all APIs, by a key that may use no model by its own name."""
    targets = [{"model": "small"}, {"model": "large"}]
    for name, rule in (("public-sum", targets), ("public-chat", [{"model": "chat"}])):
        assert httpx.put(f"{server.url}/traffic/{name}", json={"targets": rule}, headers=ADMIN).status_code == 200
    assert {over_http(server, "public-sum", "public")[0] for _ in range(8)} == {2}
    over_grpc(server, "public-sum")
    httpx.post(server.url + "/v2/repository/models/chat/unload", headers=ADMIN)
    httpx.post(server.url + "/v2/repository/models/chat/load", headers=ADMIN)
    over_http(server, "large")
    assert "chat" not in loaded(server)
    assert httpx.get(server.url + "/v2/models/public-chat/ready", headers=PUBLIC).status_code == 200
    assert "public-chat" in {each["id"] for each in httpx.get(server.url + "/v1/models", headers=PUBLIC).json()["data"]}
    body = {"model": "public-chat", "messages": [{"role": "user", "content": "The cat"}], "max_tokens": 4}
    answer = server.post("/v1/chat/completions", body, headers=PUBLIC)
    assert (answer.status_code, answer.json()["model"]) == (200, "public-chat")
    assert answer.headers["x-penstock-target"] == "chat"
    over_http(server, "large")
    counted = server.post("/tokenize", {"model": "public-chat", "prompt": "The cat"}, headers=PUBLIC)
    assert counted.json()["count"] > 0
    assert server.post("/v1/chat/completions", body | {"model": "chat"}, headers=PUBLIC).status_code == 403
    for name in ("public-sum", "public-chat"):
        assert httpx.delete(f"{server.url}/traffic/{name}", headers=ADMIN).status_code == 200
