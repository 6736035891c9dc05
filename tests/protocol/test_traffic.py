"""Public names that several models serve, on a real server with real clients."""

from __future__ import annotations

import asyncio
import json
import queue
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
from onnx import TensorProto, helper, numpy_helper

from penstock.gateway.requests.access import key_digest
from support.onnx import model, tensors
from support.sequences import write_sums
from support.server import Server, serving, wait_until

CONFIG = 'backend: "onnxruntime"\nmax_batch_size: 8\nversion_policy { all { } }\n'
KEYS = {
    "admin": 'tenant = "operators"\nroles = ["inference", "metadata", "metrics", "admin"]',
    "user": 'tenant = "user"\nmodels = ["split", "chat"]',
}
ADMIN = {"authorization": "Bearer admin"}
USER = {"authorization": "Bearer user"}
HTTP = httpx.Client(timeout=60)
"""One for all: making one takes longer than most requests."""
RULES = [
    {
        "name": "split",
        "targets": [{"model": "add", "version": 1, "weight": 90}, {"model": "add", "version": 2, "weight": 10}],
        "shadow": {"model": "shadow", "percent": 50, "max_in_flight": 64},
    },
    {
        "name": "chat",
        "targets": [{"model": "llm-a"}, {"model": "llm-b"}],
        "sticky": "header:x-session",
        "shadow": {"model": "llm-c", "max_in_flight": 64},
    },
]


def adds(number: float) -> Any:
    weights = numpy_helper.from_array(np.array([number], np.float32), "W")
    nodes = [helper.make_node("Add", ["X", "W"], ["Y"])]
    return model(nodes, tensors(["X"], ["batch", 1]), tensors(["Y"], ["batch", 1]), initializer=[weights])


def fails() -> Any:
    """Fails for every number from 1 on: it looks it up in a table that has one row. ONNX Runtime on a CPU says of any
    failure that the request was wrong."""
    table = numpy_helper.from_array(np.zeros(1, np.float32), "T")
    nodes = [
        helper.make_node("Cast", ["X"], ["I"], to=TensorProto.INT64),
        helper.make_node("Gather", ["T", "I"], ["Y"]),
    ]
    return model(nodes, tensors(["X"], ["batch", 1]), tensors(["Y"], ["batch", 1]), initializer=[table])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("traffic")
    models = folder / "models"
    made = {("add", 1): adds(1), ("add", 2): adds(2), ("shadow", 1): adds(1), ("broken", 1): fails()}
    for (name, version), graph in made.items():
        (models / name / str(version)).mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(CONFIG)
        (models / name / str(version) / "model.onnx").write_bytes(graph.SerializeToString())
    for name in ("sums_a", "sums_b"):
        write_sums(models / name)
    keys = "".join(f'[[key]]\nsha256 = "{key_digest(key.encode()).hex()}"\n{rest}\n' for key, rest in KEYS.items())
    (folder / "keys.toml").write_text(keys)
    (folder / "penstock.yaml").write_text(json.dumps({"traffic": RULES}))
    flags = ("--engine", "simulated", "--served-model-name", "llm-a,llm-b,llm-c", "--api-key-file")
    with serving(
        "penstock-demo",
        *flags,
        str(folder / "keys.toml"),
        *("--model-repository", str(models), "--model-control-mode=explicit", "--load-model=*"),
        *("--config", str(folder / "penstock.yaml")),
    ) as server:
        yield server


def body(value: float = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [value]}]}


def infer(server: Server, name: str = "split", **headers: str) -> httpx.Response:
    return HTTP.post(f"{server.url}/v2/models/{name}/infer", json=body(), headers=USER | headers)


def put(server: Server, name: str, **rule: Any) -> dict[str, Any]:
    answer = HTTP.put(f"{server.url}/traffic/{name}", json=rule, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def state(server: Server, name: str) -> dict[str, Any]:
    return dict(HTTP.get(f"{server.url}/traffic/{name}", headers=ADMIN).json())


def accepted(server: Server, name: str) -> dict[str, int]:
    return {each["target"]: each["accepted"] for each in state(server, name)["targets"]}


async def ask_many(server: Server, name: str, count: int, at_a_time: int = 16) -> Counter[str]:
    """Over gRPC: how often each version answered, and each kind of error."""
    found = Counter[str]()
    left = iter(range(count))
    given = triton_grpc.InferInput("X", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))

    async with triton_grpc_aio.InferenceServerClient(server.grpc) as client:

        async def ask() -> None:
            for _ in left:
                try:
                    answer = await client.infer(name, [given], headers=ADMIN)
                except triton_grpc_aio.InferenceServerException as error:
                    found[str(error.status())] += 1
                else:
                    found[f"{answer.as_numpy('Y')[0, 0] - 1:g}"] += 1

        await asyncio.gather(*(ask() for _ in range(at_a_time)))
    return found


def test_ninety_to_ten_and_nothing_lost(server: Server) -> None:
    before = accepted(server, "split")
    found = asyncio.run(ask_many(server, "split", 1000))
    assert found.total() == 1000
    assert set(found) == {"1", "2"}
    assert abs(found["2"] - 100) < 48  # five standard deviations
    after = state(server, "split")["targets"]
    assert [each["accepted"] - before[each["target"]] for each in after] == [found["1"], found["2"]]
    assert [each["in_flight"] for each in after] == [0, 0]


def test_shadows_are_compared_with_what_was_answered(server: Server) -> None:
    """The shadow adds 1, as version 1 does and version 2 does not."""

    def results() -> Counter[str]:
        return Counter(state(server, "split")["shadow"]["results"])

    wait_until(lambda: not state(server, "split")["shadow"]["in_flight"])
    before = results()
    answers = [infer(server) for _ in range(40)]
    wait_until(lambda: not state(server, "split")["shadow"]["in_flight"])
    found = results() - before
    assert set(found) <= {"equal", "different"}
    assert 5 < found.total() < 35
    ones = sum(answer.headers["x-penstock-target"] == "add/1" for answer in answers)
    assert found["equal"] <= ones
    text = HTTP.get(server.operator + "/metrics", headers=ADMIN).text
    assert f'penstock_traffic_shadow_total{{name="split",result="equal",shadow="shadow"}} {results()["equal"]}' in text
    assert 'penstock_traffic_share{name="split",target="add/1"} 0.9' in text


def test_who_answered_is_told_and_keys_need_a_right_to_the_public_name_alone(server: Server) -> None:
    answer = infer(server)
    version = answer.json()["model_version"]
    assert answer.json()["model_name"] == "split"
    assert answer.headers["x-penstock-target"] == f"add/{version}"
    assert answer.json()["outputs"][0]["data"] == [1 + int(version)]
    server.wait_for_log(r"ACCESS +POST /v2/models/\{model\}/infer 200 ok model=split target=add/[12] tenant=user ")
    refused = infer(server, "add")
    assert refused.status_code == 403
    assert "x-penstock-target" not in refused.headers
    own = infer(server, "add", authorization="Bearer admin")
    assert "x-penstock-target" not in own.headers
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        assert client.is_model_ready("split", headers=dict(USER))
        assert client.get_model_metadata("split", headers=dict(USER))["inputs"][0]["name"] == "X"
        assert client.get_model_config("split", headers=dict(USER))["name"] == "split"
        counted = client.get_inference_statistics("split", headers=dict(USER))["model_stats"]
        assert [(each["name"], each["version"]) for each in counted] == [("add", "1"), ("add", "2")]
        index = {each["name"]: each for each in client.get_model_repository_index(headers=dict(USER))}
        assert index["split"]["state"] == "READY"


def test_a_stream_says_with_each_response_who_answered(server: Server) -> None:
    given = triton_grpc.InferInput("X", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    results: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put(error or result), headers=dict(USER))
        for _ in range(30):
            client.async_stream_infer("split", [given])
        for _ in range(30):
            found = results.get(timeout=30).get_response()
            assert found.model_name == "split"
            assert found.parameters["penstock_target"].string_param == f"add/{found.model_version}"


def test_a_shift_is_stopped_by_errors_and_every_request_is_answered_once(server: Server) -> None:
    put(
        server,
        "stopped",
        targets=[{"model": "add", "version": 1}, {"model": "broken"}],
        shift={
            "to": "broken",
            "steps": [{"percent": 20, "seconds": 3600}, {"percent": 100, "seconds": 3600}],
            "min_requests": 10,
            "max_error_rate": 0.1,
        },
    )
    found = asyncio.run(ask_many(server, "stopped", 500))
    now = state(server, "stopped")
    assert (now["shift"]["state"], now["shift"]["percent"]) == ("rolled_back", 0)
    assert now["shift"]["reason"].startswith("error rate 1 above 0.1")
    assert found.total() == 500
    good, bad = (Counter(each["ended"]) for each in now["targets"])
    assert good == {"ok": found["1"]}
    assert bad == {"client_error": 500 - found["1"]}
    assert 10 <= bad.total() <= 10 + 16, "no more than were under way"
    server.wait_for_log(r"WARNING traffic 'stopped': shift to broken stopped and rolled back: error rate")
    events = HTTP.get(server.url + "/traffic", headers=ADMIN).json()["events"]
    assert [each["text"] for each in events if each["name"] == "stopped"][-1] == (
        "shift to broken stopped and rolled back: error rate 1 above 0.1 (0 failed and 10 refused of 10)"
    )
    assert asyncio.run(ask_many(server, "stopped", 50)) == {"1": 50}


def test_a_shift_runs_to_its_end_under_load_and_nothing_is_lost(server: Server) -> None:
    percents = (5, 25, 50, 100)
    put(
        server,
        "shifted",
        targets=[{"model": "add", "version": 1}, {"model": "add", "version": 2}],
        shift={
            "to": "add/2",
            "steps": [{"percent": each, "seconds": 0} for each in percents],
            "min_requests": 20,
            "max_latency_ms": 60_000,
        },
    )
    found = asyncio.run(ask_many(server, "shifted", 1500))
    assert found.total() == 1500
    assert set(found) == {"1", "2"}
    now = state(server, "shifted")
    assert now["shift"]["state"] == "complete"
    assert [each["ended"] for each in now["targets"]] == [{"ok": found["1"]}, {"ok": found["2"]}]
    assert asyncio.run(ask_many(server, "shifted", 50)) == {"2": 50}


def test_sequences_stay_where_they_began_when_weights_change(server: Server) -> None:
    def targets(a: float, b: float) -> list[dict[str, Any]]:
        return [{"model": "sums_a", "weight": a}, {"model": "sums_b", "weight": b}]

    def ask(id: int, start: bool = False, end: bool = False) -> int:
        given = triton_http.InferInput("INPUT", [1, 1], "INT32")
        given.set_data_from_numpy(np.ones((1, 1), np.int32))
        answer = client.infer(
            "sums", [given], sequence_id=id, sequence_start=start, sequence_end=end, headers=dict(ADMIN)
        )
        return int(answer.as_numpy("SUM")[0, 0])

    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        put(server, "sums", targets=targets(1, 1))
        assert [ask(id, start=True) for id in (1, 2, 3, 4)] == [101] * 4
        put(server, "sums", targets=targets(0, 1))
        assert [ask(id) for id in (1, 2, 3, 4)] == [102] * 4
        put(server, "sums", targets=targets(1, 0))
        assert [ask(id, end=True) for id in (1, 2, 3, 4)] == [103] * 4
        assert state(server, "sums")["sequences"] == 0


def test_chats_are_sticky_and_compared_with_a_shadow(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="user", max_retries=0)
    assert "chat" in [each.id for each in client.models.list()]

    def ask(session: str) -> str:
        answer = client.chat.completions.with_raw_response.create(
            model="chat",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=5,
            temperature=0,
            extra_headers={"x-session": session},
        )
        assert answer.parse().model == "chat"
        return str(answer.headers["x-penstock-target"])

    first = [ask(f"session {number}") for number in range(12)]
    assert set(first) == {"llm-a", "llm-b"}
    assert [ask(f"session {number}") for number in range(12)] == first
    streamed = client.completions.create(model="chat", prompt="hi", max_tokens=3, temperature=0, stream=True)
    assert [chunk.model for chunk in streamed][-1] == "chat"
    sent = {
        "/v1/completions": {"prompt": "once", "max_tokens": 3},
        "/v1/responses": {"input": "once", "max_output_tokens": 16},
        "/v1/messages": {"messages": [{"role": "user", "content": "once"}], "max_tokens": 3},
        "/api/chat": {
            "messages": [{"role": "user", "content": "once"}],
            "stream": False,
            "options": {"num_predict": 3},
        },
        "/tokenize": {"prompt": "once"},
        "/v2/models/chat/generate": {"text_input": "once", "max_tokens": 3},
    }
    for path, request in sent.items():
        answer = HTTP.post(
            server.url + path, json=request if "/v2/" in path else {"model": "chat", **request}, headers=USER
        )
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["x-penstock-target"] in ("llm-a", "llm-b"), path
    wait_until(lambda: not state(server, "chat")["shadow"]["in_flight"])
    found = state(server, "chat")
    assert found["shadow"]["results"]["equal"] >= 24, found
    assert set(found["shadow"]["results"]) <= {"equal", "uncompared", "dropped", "skipped"}
    assert sum(each["accepted"] for each in found["targets"]) == 24 + 1 + len(sent) - 1  # /tokenize generates nothing
    assert [each["in_flight"] for each in found["targets"]] == [0, 0]
    assert client.models.retrieve("chat").id == "chat"
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client.completions.create(model="llm-a", prompt="x")
    assert "x-penstock-target" not in refused.value.response.headers


def test_a_target_that_is_unloaded_gives_its_share_away_and_stops_a_shift(server: Server) -> None:
    targets = [{"model": "add", "version": 1}, {"model": "shadow"}]
    put(server, "gone", targets=targets)
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        client.unload_model("shadow", headers=dict(ADMIN))
        assert asyncio.run(ask_many(server, "gone", 50)) == {"1": 50}
        assert state(server, "gone")["targets"][1]["unavailable"]
        shift = {"to": "shadow", "steps": [{"percent": 50, "seconds": 0}, {"percent": 100, "seconds": 3600}]}
        put(server, "gone", targets=targets, shift=shift)
        assert asyncio.run(ask_many(server, "gone", 10)) == {"1": 10}
        assert state(server, "gone")["shift"]["state"] == "waiting"
        client.load_model("shadow", headers=dict(ADMIN))
        assert infer(server, "gone", **ADMIN).status_code == 200
        assert state(server, "gone")["shift"]["state"] == "running"
        client.unload_model("shadow", headers=dict(ADMIN))
        assert asyncio.run(ask_many(server, "gone", 20)) == {"1": 20}
        found = state(server, "gone")["shift"]
        assert (found["state"], found["reason"]) == ("rolled_back", "it is not available")
        put(server, "gone", targets=[{"model": "shadow"}])
        answer = infer(server, "gone", **ADMIN)
        assert answer.status_code == 503
        assert "'gone' is not at ready state" in answer.text
        client.load_model("shadow", headers=dict(ADMIN))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"targets": []}, "it needs 1 to 16 targets"),
        ({"name": "other", "targets": [{"model": "add"}]}, "name: it is another one than in the path."),
        ({"targets": [{"model": "add"}], "weights": 3}, "unknown field"),
        ([], "expected `object`"),
    ],
)
def test_what_is_no_rule_is_refused(server: Server, rule: Any, message: str) -> None:
    answer = HTTP.put(server.url + "/traffic/wrong", json=rule, headers=ADMIN)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert HTTP.get(server.url + "/traffic/wrong", headers=ADMIN).status_code == 404


def test_rules_come_and_go_by_an_operator_s_key_alone(server: Server) -> None:
    rule = {"targets": [{"model": "add"}]}
    assert HTTP.put(server.url + "/traffic/new/name", json=rule, headers=USER).status_code == 403
    assert HTTP.get(server.url + "/traffic", headers=USER).status_code == 403
    put(server, "new/name", **rule)
    assert infer(server, "new%2Fname", **ADMIN).json()["model_name"] == "new/name"
    assert HTTP.delete(server.url + "/traffic/new/name", headers=ADMIN).json() == {"name": "new/name", "deleted": True}
    assert HTTP.delete(server.url + "/traffic/new/name", headers=ADMIN).status_code == 404
    assert infer(server, "new%2Fname", **ADMIN).status_code == 404
    escaped = json.dumps({"name": "\u00e9t\u00e9", **rule})
    assert "\\u00e9" in escaped
    answer = HTTP.put(server.url + "/traffic/\u00e9t\u00e9", content=escaped, headers=ADMIN)
    assert answer.json()["rule"]["name"] == "\u00e9t\u00e9", "however JSON writes the name of the path"
    HTTP.delete(server.url + "/traffic/\u00e9t\u00e9", headers=ADMIN)
