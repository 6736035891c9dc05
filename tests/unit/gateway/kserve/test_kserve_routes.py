"""What answers below /v2, and its errors in Triton's shape."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers_kserve import FakeModel, FakeModelStore, add_sub, identity, repeat
from helpers_kserve_http import kserve_app, kserve_context
from penstock.engines import errors as tree
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.kserve import http_infer
from penstock.gateway.kserve.headers import forward_pattern
from penstock.gateway.kserve.http_routes import KServeApp
from penstock.gateway.kserve.trace_settings import TraceSettings
from penstock.gateway.kserve.tracing import Tracing
from protocol.asgi_client import AsgiCall, call

FLOATS = [float(value) for value in range(16)]
GOOD = {"inputs": [{"name": f"INPUT{i}", "shape": [16], "datatype": "FP32", "data": FLOATS} for i in (0, 1)]}
INFER = "/v2/models/add_sub/infer"


class Front:
    """The app over these models; `settings` and `context` options go where they belong."""

    def __init__(self, *models: FakeModel, settings: AppSettings | None = None, **options: Any) -> None:
        self.store = FakeModelStore(*(models or (add_sub(),)))
        self.settings = settings or AppSettings()
        self.app = kserve_app(kserve_context(self.store, **options), self.settings)

    async def __call__(self, method: str, path: str, body: Any = b"", **headers: str) -> AsgiCall:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await call(self.app, path, body, method=method, headers=named)


@pytest.fixture
def front() -> Front:
    return Front()


def error(answer: AsgiCall) -> str:
    found = answer.json()
    assert list(found) == ["error"]
    return str(found["error"])


# Routes


async def test_the_server_and_its_models_describe_themselves(front: Front) -> None:
    assert (await front("GET", "/v2")).json()["name"] == "penstock"
    assert (await front("GET", "/v2/models/add_sub")).json()["versions"] == ["1"]
    assert (await front("GET", "/v2/models/add_sub/versions/1")).json()["name"] == "add_sub"
    config = (await front("GET", "/v2/models/add_sub/config")).json()
    assert (config["name"], config["input"][0]["data_type"]) == ("add_sub", "TYPE_FP32")
    assert (await front("GET", "/v2/models/stats")).json()["model_stats"][0]["name"] == "add_sub"
    assert (await front("GET", "/v2/models/add_sub/versions/1/stats")).json()["model_stats"][0]["version"] == "1"


async def test_metadata_lists_all_versions_or_the_one_asked_for() -> None:
    front = Front(add_sub(), add_sub(version=3))
    assert (await front("GET", "/v2/models/add_sub")).json()["versions"] == ["1", "3"]
    assert (await front("GET", "/v2/models/add_sub/versions/1")).json()["versions"] == ["1"]


async def test_health_is_a_status_with_an_empty_body(front: Front) -> None:
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/add_sub/ready",
        "/v2/models/add_sub/versions/1/ready",
    ):
        answer = await front("GET", path)
        assert (answer.status, answer.bodies, answer.headers["content-type"]) == (200, [b""], "text/plain")


async def test_not_ready_is_400(front: Front) -> None:
    front.store.model("add_sub").ready = False
    front.store.ready = False
    assert (await front("GET", "/v2/health/ready")).status == 400
    assert (await front("GET", "/v2/health/live")).status == 200
    for path in ("/v2/models/add_sub/ready", "/v2/models/zz/ready", "/v2/models/add_sub/versions/7/ready"):
        answer = await front("GET", path)
        assert (answer.status, error(answer)) == (400, "Model version not ready")


@pytest.mark.parametrize(
    "path",
    [
        "/v2/",
        "/v2/foo",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/models/add_sub/",
        "/v2/models/add_sub/foo",
        "/v2/models/add_sub/infer/",
        "/v2/models/add_sub/versions",
        "/v2/models/add_sub/versions/x",
        "/v2/models/add_sub/versions/-1",
        "/v2/models/add_sub/versions//infer",
        "/v2/models/add_sub/versions/1/trace/setting",
        "/v2/models/add_sub/trace%2Fsetting",
        "/v2/health",
        "/v2/health/live/",
        "/v2/repository/models/a",
        "/v2/repository/models/a/reload",
        "/v2/systemsharedmemory",
        "/v2/systemsharedmemory/register",
        "/v2/systemsharedmemory/region/r",
        "/v2/othersharedmemory/status",
    ],
)
async def test_there_is_nothing_else(front: Front, path: str) -> None:
    answer = await AsgiCall(front.app, path, method="GET").run()
    assert answer.status == 404
    assert "error" in answer.json()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v2", "GET"),
        ("GET", INFER, "POST"),
        ("DELETE", INFER, "POST"),
        ("POST", "/v2/models/add_sub", "GET"),
        ("PUT", "/v2/logging", "GET, POST"),
        ("GET", "/v2/repository/index", "POST"),
    ],
)
async def test_other_methods_are_not_allowed(front: Front, method: str, path: str, allow: str) -> None:
    answer = await front(method, path)
    assert (answer.status, error(answer), answer.headers["allow"]) == (405, "Method Not Allowed", allow)


def test_the_app_says_which_paths_are_its_own() -> None:
    assert all(map(KServeApp.handles, ("/v2", "/v2/", "/v2/models/x")))
    assert not any(map(KServeApp.handles, ("/v20", "/v2x/models", "/v1/models", "/", "")))


async def test_names_are_decoded_once() -> None:
    front = Front(add_sub("a b"), add_sub("a%20b"), add_sub("a/b"))
    for path, name in (("a%20b", "a b"), ("a%2520b", "a%20b"), ("a%2Fb", "a/b")):
        scope_path = f"/v2/models/{path}"
        request = AsgiCall(front.app, scope_path.replace("%2F", "/").replace("%20", " "), method="GET")
        request._scope["raw_path"] = scope_path.encode()
        assert (await request.run()).json()["name"] == name


@pytest.mark.parametrize("path", ["", "/versions/9", "/config", "/infer", "/versions/9/infer"])
async def test_unknown_models(front: Front, path: str) -> None:
    name = "add_sub" if "versions" in path else "zz"
    answer = await front("POST" if "infer" in path else "GET", f"/v2/models/{name}{path}", GOOD)
    assert answer.status == 404
    assert error(answer).startswith(f"Request for unknown model: '{name}'")


async def test_statistics_of_unknown_models_are_a_bad_request(front: Front) -> None:
    answer = await front("GET", "/v2/models/zz/stats")
    assert (answer.status, error(answer)) == (400, "requested model 'zz' is not available")
    answer = await front("GET", "/v2/models/add_sub/versions/9/stats")
    assert error(answer) == "requested model version is not available for model 'add_sub'"


async def test_the_neighbours_routes_are_reached(front: Front) -> None:
    assert (await front("GET", "/v2/logging")).json()
    assert (await front("GET", "/v2/trace/setting")).json()["trace_level"] == ["OFF"]
    assert (await front("GET", "/v2/models/add_sub/trace/setting")).status == 200
    assert (await front("POST", "/v2/trace/setting", {"trace_rate": "5"})).json()["trace_rate"] == "5"
    assert (await front("POST", "/v2/repository/index")).json()[0]["name"] == "add_sub"
    assert (await front("POST", "/v2/repository/models/add_sub/load")).status == 200
    assert (await front("POST", "/v2/repository/models/add_sub/unload")).status == 200
    assert [name for name, _, _ in front.store.loads] == ["add_sub"]
    for kind in ("system", "cuda"):
        assert (await front("GET", f"/v2/{kind}sharedmemory/status")).json() == []
        assert (await front("GET", f"/v2/{kind}sharedmemory/region/zz/status")).status == 404
    assert (
        await front("POST", "/v2/systemsharedmemory/region/r/register", {"key": "/k", "byte_size": 1})
    ).status == 501
    answer = await front("POST", "/v2/models/add_sub/generate", {"INPUT0": FLOATS, "INPUT1": FLOATS})
    assert answer.json()["OUTPUT0"] == [2 * value for value in FLOATS]


@pytest.mark.parametrize("path", ["repo/index", "repo/models/m/load", "repo/models/m/unload"])
async def test_repositories_have_no_names(front: Front, path: str) -> None:
    answer = await front("POST", f"/v2/repository/{path}")
    assert (answer.status, error(answer)) == (501, "'repository_name' specification is not supported")


# Errors that others raise, in this shape


async def test_a_missing_key(front: Front) -> None:
    front = Front(settings=AppSettings(api_keys={"team": "secret"}))
    for path in ("/v2", INFER, "/v2/nothing"):
        answer = await front("GET", path)
        assert answer.status == 401
        assert error(answer)
    answer = await front("POST", INFER, GOOD, authorization="Bearer secret")
    assert answer.status == 200
    assert front.store.model("add_sub").requests[0].tenant == "team"


async def test_a_drain(front: Front) -> None:
    front.settings.drain.begin()
    answer = await front("POST", INFER, GOOD)
    assert (answer.status, error(answer)) == (503, "The server is shutting down.")
    assert "retry-after" in answer.headers
    assert (await front("GET", "/v2/health/ready")).status == 400


async def test_bodies_over_the_limit_are_not_read() -> None:
    front = Front(max_input_bytes=1000)
    answer = await call(front.app, INFER, [b"x" * 600, b"x" * 600, b"x" * 600])
    assert (answer.status, answer.unread) == (413, 1)
    assert error(answer)
    answer = await call(front.app, INFER, [b"x" * 600] * 3, headers={"content-length": "1800"})
    assert (answer.status, answer.unread) == (413, 3)
    assert not front.store.model("add_sub").requests


async def test_errors_of_the_model(front: Front) -> None:
    model = front.store.model("add_sub")
    for raised, status in ((tree.QueueFullError("Exceeds maximum queue size"), 503), (tree.UnknownError("odd"), 400)):
        model.error = raised
        answer = await front("POST", INFER, GOOD)
        assert (answer.status, error(answer)) == (status, raised.message)


async def test_a_bug_says_nothing(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> Any:
        raise KeyError("secret")

    front.store.model("add_sub")._compute = broken
    answer = await front("POST", INFER, GOOD)
    assert answer.status == 500
    assert "secret" not in error(answer)
    assert "secret" in caplog.text


# Infer


async def test_infer(front: Front) -> None:
    answer = await front("POST", INFER, GOOD | {"id": "7"})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    found = answer.json()
    assert (found["id"], found["model_name"], found["model_version"]) == ("7", "add_sub", "1")
    assert found["outputs"][0]["data"] == [2 * value for value in FLOATS]
    assert (await front("POST", "/v2/models/add_sub/versions/1/infer", GOOD)).status == 200


async def test_parameters_of_the_response(front: Front) -> None:
    front.store.model("add_sub").response_parameters = {"a": 1}
    assert (await front("POST", INFER, GOOD)).json()["parameters"] == {"a": 1}


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream", "text/plain", ""])
async def test_any_content_type_will_do(front: Front, kind: str) -> None:
    assert (await front("POST", INFER, GOOD, content_type=kind)).status == 200


async def test_decoupled_models_are_for_streams() -> None:
    answer = await Front(repeat())("POST", "/v2/models/repeat/infer", b"not even JSON")
    assert answer.status == 501
    assert error(answer) == "HTTP end point doesn't support models with decoupled transaction policy"


@pytest.mark.parametrize("value", ["99999999999", "-1", "1e3", "+5", "5 ", "0x10", "", "5,5", "٣", "9" * 5000, "1_0"])
async def test_header_lengths_that_are_none(front: Front, value: str) -> None:
    answer = await front("POST", INFER, GOOD, inference_header_content_length=value)
    assert answer.status == 400
    assert error(answer)


async def test_a_header_length_may_be_given_once(front: Front) -> None:
    body = json.dumps(GOOD).encode()
    request = AsgiCall(front.app, INFER, body)
    length = (b"inference-header-content-length", b"%d" % len(body))
    request._scope["headers"] += [length, length]
    assert (await request.run()).status == 400


async def test_binary_answers_come_with_the_length_of_their_head(front: Front) -> None:
    answer = await front("POST", INFER, GOOD | {"parameters": {"binary_data_output": True}})
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers["inference-header-content-length"])
    body = b"".join(answer.bodies)
    assert json.loads(body[:length])["outputs"][1]["parameters"] == {"binary_data_size": 64}
    assert len(body) == length + 128 == int(answer.headers["content-length"])


async def test_long_binary_answers_leave_in_pieces() -> None:
    front = Front(identity("FP32"))
    count = 200_000
    head = {
        "inputs": [
            {"name": "INPUT0", "shape": [count], "datatype": "FP32", "parameters": {"binary_data_size": 4 * count}}
        ],
        "parameters": {"binary_data_output": True},
    }
    data = json.dumps(head).encode()
    tail = bytes(range(256)) * (4 * count // 256)
    answer = await front(
        "POST", "/v2/models/identity_fp32/infer", data + tail, inference_header_content_length=str(len(data))
    )
    assert answer.complete
    assert len(answer.bodies) == 2
    assert answer.bodies[1] == tail
    assert int(answer.headers["content-length"]) == sum(map(len, answer.bodies))


async def test_compressed_requests_and_answers() -> None:
    front = Front(identity("BYTES"))
    path = "/v2/models/identity_bytes/infer"
    text = "tensor" * 1000
    body = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "BYTES", "data": [text]}]}).encode()
    answer = await front("POST", path, gzip.compress(body), content_encoding="gzip", accept_encoding="deflate")
    assert answer.headers["content-encoding"] == "deflate"
    assert json.loads(zlib.decompress(b"".join(answer.bodies)))["outputs"][0]["data"] == [text]
    answer = await front("POST", path, zlib.compress(body), content_encoding="deflate", accept_encoding="gzip")
    assert json.loads(gzip.decompress(b"".join(answer.bodies)))["outputs"][0]["data"] == [text]
    assert "content-encoding" not in (await front("POST", path, body)).headers


async def test_short_answers_are_not_compressed(front: Front) -> None:
    assert "content-encoding" not in (await front("POST", INFER, GOOD, accept_encoding="gzip")).headers


async def test_unknown_encodings(front: Front) -> None:
    answer = await front("POST", INFER, GOOD, content_encoding="br")
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip, deflate")


async def test_decompressed_bodies_have_the_same_limit() -> None:
    front = Front(max_input_bytes=10_000)
    answer = await front("POST", INFER, gzip.compress(bytes(10_001)), content_encoding="gzip")
    assert answer.status == 413


async def test_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    front = Front(identity("FP32", [2], output_extra='label_filename: "labels.txt"', folder=tmp_path))
    answer = await front(
        "POST",
        "/v2/models/identity_fp32/infer",
        {
            "inputs": [{"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": [0.5, 0.25]}],
            "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}],
        },
    )
    assert answer.json()["outputs"][0]["data"] == ["0.500000:0:cat", "0.250000:1:dog"]


async def test_headers_reach_the_model() -> None:
    front = Front(header_forward_pattern=forward_pattern("x-mine-.*"))
    await front("POST", INFER, GOOD, x_mine_a="1", x_other="2", x_request_timeout="30")
    request = front.store.model("add_sub").requests[0]
    assert request.parameters == {"x-mine-a": "1"}
    assert request.deadline is not None


async def test_a_bad_timeout_is_refused(front: Front) -> None:
    assert (await front("POST", INFER, GOOD, x_request_timeout="soon")).status == 400


async def test_traced_requests(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    settings = TraceSettings(trace_level=("TIMESTAMPS", "TENSORS"), trace_rate=1, trace_count=-1, log_frequency=0)
    tracing = Tracing(str(file), settings)
    front = Front(tracing=tracing)
    assert (await front("POST", INFER, GOOD)).status == 200
    assert front.store.model("add_sub").requests[0].trace is not None
    tracing.close()
    written = file.read_text()
    for event in ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END", "OUTPUT0"):
        assert event in written


async def test_a_client_that_leaves_cancels_its_request(front: Front) -> None:
    model = front.store.model("add_sub")
    model.gate = asyncio.Event()
    request = AsgiCall(front.app, INFER, GOOD)
    running = asyncio.create_task(request.run())
    await model.waiting.wait()
    request.disconnect()
    await asyncio.wait_for(running, 10)
    assert model.cancelled.is_set()
    assert request.messages == []
    assert front.settings.drain.in_flight == 0


async def test_a_drain_that_ends_interrupts(front: Front) -> None:
    model = front.store.model("add_sub")
    model.gate = asyncio.Event()
    request = AsgiCall(front.app, INFER, GOOD)
    running = asyncio.create_task(request.run())
    await model.waiting.wait()
    front.settings.drain.expire()
    await running
    assert (request.status, model.cancelled.is_set()) == (503, True)


@pytest.mark.parametrize("count", [1, 20_000])
async def test_long_requests_hold_up_nobody(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many strings behind a short head are read in a thread, few are not."""
    front = Front(identity("BYTES"))
    threads: list[Any] = []
    monkeypatch.setattr(http_infer, "parse_infer", partial(_noting_thread, threads, http_infer.parse_infer))
    given = {"name": "INPUT0", "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [given]}).encode()
    path = "/v2/models/identity_bytes/infer"
    answer = await front("POST", path, head + bytes(4 * count), inference_header_content_length=str(len(head)))
    assert answer.json()["outputs"][0]["data"] == [""] * count
    assert (threads == [threading.main_thread()]) == (count == 1)


def _noting_thread(threads: list[Any], function: Any, *args: Any) -> Any:
    threads.append(threading.current_thread())
    return function(*args)
