"""What answers below /v2, and its errors in Triton's shape."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines import errors as tree
from penstock.gateway.apis.kserve.routes import KSERVE
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from support.keys import api_keys
from support.kserve import add_sub
from support.kserve_http import KServeFront, error_of

FLOATS = [float(value) for value in range(16)]
GOOD = {"inputs": [{"name": f"INPUT{i}", "shape": [16], "datatype": "FP32", "data": FLOATS} for i in (0, 1)]}
INFER = "/v2/models/add_sub/infer"


@pytest.fixture
def front() -> KServeFront:
    return KServeFront()


# Routes


async def test_the_server_and_its_models_describe_themselves(front: KServeFront) -> None:
    assert (await front("GET", "/v2")).json()["name"] == "penstock"
    assert (await front("GET", "/v2/models/add_sub")).json()["versions"] == ["1"]
    assert (await front("GET", "/v2/models/add_sub/versions/1")).json()["name"] == "add_sub"
    config = (await front("GET", "/v2/models/add_sub/config")).json()
    assert (config["name"], config["input"][0]["data_type"]) == ("add_sub", "TYPE_FP32")
    assert (await front("GET", "/v2/models/stats")).json()["model_stats"][0]["name"] == "add_sub"
    assert (await front("GET", "/v2/models/add_sub/versions/1/stats")).json()["model_stats"][0]["version"] == "1"


async def test_metadata_lists_all_versions_or_the_one_asked_for() -> None:
    front = KServeFront(add_sub(), add_sub(version=3))
    assert (await front("GET", "/v2/models/add_sub")).json()["versions"] == ["1", "3"]
    assert (await front("GET", "/v2/models/add_sub/versions/1")).json()["versions"] == ["1"]


async def test_health_is_a_status_and_what_kserve_s_client_reads(front: KServeFront) -> None:
    for path, body in {
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        "/v2/models/add_sub/ready": {"name": "add_sub", "ready": True},
        "/v2/models/add_sub/versions/1/ready": {"name": "add_sub", "ready": True},
    }.items():
        answer = await front("GET", path, accept_encoding="identity")
        assert (answer.status, answer.json(), answer.headers["content-type"]) == (200, body, "application/json")
        answer = await front("GET", path)  # as curl does, all of whose output Triton's scripts compare with the status
        assert (answer.status, b"".join(answer.bodies)) == (200, b"")


async def test_what_a_model_says_of_itself_is_told_those_who_ask(front: KServeFront) -> None:
    front.store.model("add_sub").says_ready = False
    answer = await front("GET", "/v2/models/add_sub/ready")
    assert (answer.status, error_of(answer)) == (400, "Model version not ready")
    assert (await front("GET", "/v2/models/add_sub")).status == 200


async def test_not_ready_is_400(front: KServeFront) -> None:
    front.store.model("add_sub").ready = False
    front.store.ready = False
    assert (await front("GET", "/v2/health/live")).status == 200
    not_ready = await front("GET", "/v2/health/ready", accept_encoding="identity")
    assert (not_ready.status, not_ready.json()) == (400, {"ready": False})
    for path in ("/v2/models/add_sub/ready", "/v2/models/zz/ready", "/v2/models/add_sub/versions/7/ready"):
        answer = await front("GET", path)
        assert (answer.status, error_of(answer)) == (400, "Model version not ready")


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
async def test_there_is_nothing_else(front: KServeFront, path: str) -> None:
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
async def test_other_methods_are_not_allowed(front: KServeFront, method: str, path: str, allow: str) -> None:
    answer = await front(method, path)
    assert (answer.status, error_of(answer), answer.headers["allow"]) == (405, "Method Not Allowed", allow)


def test_the_api_says_which_paths_are_its_own() -> None:
    assert all(map(KSERVE.has, ("/v2", "/v2/", "/v2/models/x")))
    assert not any(map(KSERVE.has, ("/v20", "/v2x/models", "/v1/models", "/", "")))


async def test_names_are_decoded_once() -> None:
    front = KServeFront(add_sub("a b"), add_sub("a%20b"), add_sub("a/b"))
    for path, name in (("a%20b", "a b"), ("a%2520b", "a%20b"), ("a%2Fb", "a/b")):
        scope_path = f"/v2/models/{path}"
        request = AsgiCall(front.app, scope_path.replace("%2F", "/").replace("%20", " "), method="GET")
        request._scope["raw_path"] = scope_path.encode()
        assert (await request.run()).json()["name"] == name


@pytest.mark.parametrize("path", ["", "/versions/9", "/config", "/infer", "/versions/9/infer"])
async def test_unknown_models(front: KServeFront, path: str) -> None:
    name = "add_sub" if "versions" in path else "zz"
    answer = await front("POST" if "infer" in path else "GET", f"/v2/models/{name}{path}", GOOD)
    assert answer.status == 404
    assert error_of(answer).startswith(f"Request for unknown model: '{name}'")


async def test_statistics_of_unknown_models_are_a_bad_request(front: KServeFront) -> None:
    answer = await front("GET", "/v2/models/zz/stats")
    assert (answer.status, error_of(answer)) == (400, "requested model 'zz' is not available")
    answer = await front("GET", "/v2/models/add_sub/versions/9/stats")
    assert error_of(answer) == "requested model version is not available for model 'add_sub'"


async def test_statistics_of_a_version_that_is_not_ready_any_more(front: KServeFront) -> None:
    find = front.store.model

    def model(name: str, version: str = "", request: Any = None) -> Any:
        if version == "9":
            raise tree.NotReadyError(f"Request for unknown model: '{name}' version 9 is not at ready state")
        return find(name, version, request)

    front.store.model = model  # type: ignore[method-assign]
    answer = await front("GET", "/v2/models/add_sub/versions/9/stats")
    assert (answer.status, error_of(answer)) == (400, "requested model version is not available for model 'add_sub'")


async def test_the_neighbours_routes_are_reached(front: KServeFront) -> None:
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
async def test_repositories_have_no_names(front: KServeFront, path: str) -> None:
    answer = await front("POST", f"/v2/repository/{path}")
    assert (answer.status, error_of(answer)) == (501, "'repository_name' specification is not supported")


# Errors that others raise, in this shape


async def test_a_missing_key(front: KServeFront) -> None:
    front = KServeFront(settings=AppSettings(keys=api_keys({"team": "secret"})))
    for path in ("/v2", INFER, "/v2/nothing"):
        answer = await front("GET", path)
        assert answer.status == 401
        assert error_of(answer)
    answer = await front("POST", INFER, GOOD, authorization="Bearer secret")
    assert answer.status == 200
    assert front.store.model("add_sub").requests[0].tenant == "team"


async def test_a_drain(front: KServeFront) -> None:
    front.settings.drain.begin()
    answer = await front("POST", INFER, GOOD)
    assert (answer.status, error_of(answer)) == (503, "The server is shutting down.")
    assert "retry-after" in answer.headers
    assert (await front("GET", "/v2/health/ready")).status == 400


async def test_bodies_over_the_limit_are_not_read() -> None:
    front = KServeFront(max_input_bytes=1000)
    answer = await call(front.app, INFER, [b"x" * 600, b"x" * 600, b"x" * 600])
    assert (answer.status, answer.unread) == (413, 1)
    assert error_of(answer)
    answer = await call(front.app, INFER, [b"x" * 600] * 3, headers={"content-length": "1800"})
    assert (answer.status, answer.unread) == (413, 3)
    assert not front.store.model("add_sub").requests


async def test_errors_of_the_model(front: KServeFront) -> None:
    model = front.store.model("add_sub")
    for raised, status in ((tree.QueueFullError("Exceeds maximum queue size"), 503), (tree.UnknownError("odd"), 400)):
        model.error = raised
        answer = await front("POST", INFER, GOOD)
        assert (answer.status, error_of(answer)) == (status, raised.message)


async def test_a_bug_says_nothing(front: KServeFront, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> Any:
        raise KeyError("secret")

    front.store.model("add_sub")._compute = broken
    answer = await front("POST", INFER, GOOD)
    assert answer.status == 500
    assert "secret" not in error_of(answer)
    assert "secret" in caplog.text


async def test_the_routes_that_the_root_names_are_there(front: KServeFront) -> None:
    about = await AsgiCall(front.app, "/", method="GET", headers={"accept": "application/json"}).run()
    named = about.json()["kserve"]
    assert "GET /v2" in named
    for method, path in map(str.split, named):
        assert (await front(method, path.replace("{name}", "add_sub"))).status in (200, 400)


@pytest.mark.parametrize(
    "path",
    [
        INFER,
        "/v2/models/add_sub/generate",
        "/v2/repository/index",
        "/v2/repository/models/add_sub/load",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/systemsharedmemory/region/r/register",
    ],
)
async def test_a_client_that_leaves_within_its_body_is_no_error(
    front: KServeFront, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    left = await call(front.app, path, [b"{", None])
    assert left.messages == []
    assert not caplog.records
