"""Keys by default, routes, request ids, health, and what errors tell."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

import penstock.gateway.server.ports.http_apps
from penstock.engines import errors as tree
from penstock.gateway.errors import error_headers, error_json, wire_shape
from penstock.gateway.requests.call import DrainState, name_request
from penstock.gateway.server.ports.about import DOCUMENTATION
from penstock.gateway.server.ports.http_apps import build_app, build_metrics_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane
from support.keys import api_keys

ROUTES = {
    "/v1/chat/completions": "POST",
    **dict.fromkeys(("/v1/chat/completions/{completion_id}", "/v1/chat/completions/{completion_id}/messages"), "GET"),
    "/v1/completions": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/embeddings": "POST",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"), "POST"),
    "/tokenizer_info": "GET",
    **dict.fromkeys(("/embed", "/v1/embed", "/v2/embed"), "POST"),
    **dict.fromkeys(("/classify", "/v1/classify", "/pooling"), "POST"),
    "/v1/models": "GET",
    "/v1/models/tiny": "GET",
    "/v1/load_lora_adapter": "POST",
    "/v1/unload_lora_adapter": "POST",
    **dict.fromkeys(("/v1/responses", "/v1/responses/input_tokens"), "POST"),
    "/v1/responses/{response_id}": "GET",
    "/v1/responses/{response_id}/cancel": "POST",
    "/v1/responses/{response_id}/input_items": "GET",
    "/v1/conversations": "POST",
    "/v1/conversations/{conversation_id}": "GET",
    "/v1/conversations/{conversation_id}/items": "GET",
    "/v1/conversations/{conversation_id}/items/{item_id}": "GET",
    **dict.fromkeys(("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"), "GET"),
    **dict.fromkeys(("/v1/batches", "/v1/batches/{batch_id}"), "GET"),
    **dict.fromkeys(("/v1/messages/batches/{batch_id}", "/v1/messages/batches/{batch_id}/results"), "GET"),
    "/v1/messages/batches": "GET",
    "/v1/messages/batches/{batch_id}/cancel": "POST",
    "/v1/batches/{batch_id}/cancel": "POST",
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"), "POST"),
    **dict.fromkeys(("/api/pull", "/api/create", "/api/copy", "/api/push"), "POST"),
    "/api/delete": "DELETE",
    **dict.fromkeys(("/api/tags", "/api/ps", "/api/version"), "GET"),
    **dict.fromkeys(("/sleep", "/wake_up", "/reset_prefix_cache"), "POST"),
    "/is_sleeping": "GET",
    **dict.fromkeys(("/traffic", "/traffic/tiny"), "GET"),
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/ping": "GET",
    "/health": "GET",
    "/health/live": "GET",
    "/health/ready": "GET",
    **dict.fromkeys(("/metrics", "/metrics/"), "GET"),
    **dict.fromkeys(("/version", "/server_info"), "GET"),
    "/openapi.json": "GET",
    "/": "GET",
}
PROBES = {"/health", "/health/live", "/health/ready", "/ping", "/"}
LOCKED = {"red": "key-one", "blue": "key-two"}


async def metrics() -> tuple[bytes, str]:
    return b"penstock_up 1\n", "text/plain; version=0.0.4"


async def get(path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, **settings: Any) -> AsgiCall:
    app = build_app(FakeDataPlane(), AppSettings(metrics=metrics, **settings))
    return await call(app, path, method=method, headers=dict(headers or {}))


def test_the_table_here_knows_every_route() -> None:
    app: Any = build_app(FakeDataPlane(), AppSettings())
    known = {path.replace("tiny", "{name:path}") for path in ROUTES}
    assert {route.path for route in app.routes.all} == known


@pytest.mark.parametrize("path", [*ROUTES, "/nowhere", "/v1", "/health/../v1/models", "//health", ""])
async def test_without_a_key_only_health_answers(path: str) -> None:
    app = build_app(FakeDataPlane(), AppSettings(metrics=metrics, keys=api_keys(LOCKED)))
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"):
        check_that_only_health_answers(path, method, await call(app, path, method=method))


def check_that_only_health_answers(path: str, method: str, result: AsgiCall) -> None:
    if path in PROBES and method in ("GET", "HEAD", *(("POST",) if path == "/ping" else ())):
        assert result.status == 200, method
        return
    assert result.status == 401, method
    assert result.headers["www-authenticate"] == "Bearer"
    error = result.json().get("error")
    if path in ("/v1/embed", "/v2/embed"):
        assert set(result.json()) == {"id", "message"}
        return
    if isinstance(error, str):
        assert path.startswith("/api/")
        return
    assert error["type"] == "authentication_error"
    assert error.get("code", "invalid_api_key") == "invalid_api_key"


@pytest.mark.parametrize("host", ["x/health?", "x/v1/../metrics#", "a@b", "", "health"])
async def test_host_header_opens_nothing(host: str) -> None:
    assert (await get("/v1/models", headers={"host": host}, keys=api_keys(LOCKED))).status == 401


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic key-one",
        "key-one",
        "Bearer key-one key-two",
        "Bearer key-on",
        "Bearer key-one\0",
    ],
)
async def test_wrong_keys_are_refused(value: str) -> None:
    assert (await get("/v1/models", headers={"authorization": value}, keys=api_keys(LOCKED))).status == 401


@pytest.mark.parametrize("value", ["Bearer key-one", "bearer key-two", "Bearer  key-one "])
async def test_right_keys_are_let_in(value: str) -> None:
    assert (await get("/v1/models", headers={"authorization": value}, keys=api_keys(LOCKED))).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "key-one"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "Bearer key-one"}, 401),
        ({"authorization": "Bearer key-one", "x-api-key": "wrong"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "key-one"}, 401),
    ],
)
async def test_keys_may_come_as_clients_of_anthropic_send_them(headers: dict[str, str], status: int) -> None:
    assert (await get("/v1/models", headers=headers, keys=api_keys(LOCKED))).status == status
    assert (await get("/v1/models", headers=headers)).status == 200


async def test_the_keys_are_compared_before_the_route_is_looked_up() -> None:
    good = {"authorization": "Bearer key-one"}
    assert (await get("/nowhere", headers=good, keys=api_keys(LOCKED))).status == 404


@pytest.mark.parametrize("keys", [LOCKED, {}])
async def test_one_request_has_one_authorization(keys: Mapping[str, str]) -> None:
    """The first might be the caller's, and the second what a proxy has put behind it."""
    app = build_app(FakeDataPlane(), AppSettings(keys=api_keys(keys)))
    request = AsgiCall(app, "/v1/models", method="GET", headers={"authorization": "Bearer key-one"})
    request._scope["headers"] *= 2
    assert (await request.run()).status == 400
    assert request.json()["error"]["message"] == "Authorization is given more than once."


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/nowhere", "No such route: GET /nowhere."),
        ("POST", "/chat/completions", "No such route: POST /chat/completions. Did you mean /v1/chat/completions?"),
        ("GET", "/models/tiny", "No such route: GET /models/tiny. Did you mean /v1/models/tiny?"),
        ("GET", "/completions/", "No such route: GET /completions. Did you mean /v1/completions?"),
        ("POST", "/v1/v1/completions", "No such route: POST /v1/v1/completions. Did you mean /v1/completions?"),
        ("GET", "/v1/health", "No such route: GET /v1/health. Did you mean /health?"),
        ("GET", "/" + "x" * 1000, "No such route: GET /" + "x" * 127 + "."),
    ],
)
async def test_an_unknown_route_is_named_and_the_likely_one_too(method: str, path: str, said: str) -> None:
    missing = await get(path, method=method)
    assert missing.status == 404
    error = missing.json()["error"]
    assert (error["message"], error["code"]) == (said, "route_not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", "/v1/completions", "POST"), ("PUT", "/v1/models/x", "GET, HEAD")]
)
async def test_a_route_names_the_methods_that_it_allows(method: str, path: str, allowed: str) -> None:
    wrong = await get(path, method=method)
    assert (wrong.status, wrong.headers["allow"]) == (405, allowed)
    error = wrong.json()["error"]
    assert error["message"] == f"{path} does not allow {method}, only {allowed}."
    assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_allowed")


@pytest.mark.parametrize("path", ["/health/", "/health/ready/", "/v1/models/", "/v1/models/tiny/", "/version/"])
async def test_a_trailing_slash_changes_nothing(path: str) -> None:
    with_slash, without = await get(path), await get(path[:-1])
    assert (with_slash.status, with_slash.bodies) == (200, without.bodies)
    assert (await get(path, keys=api_keys(LOCKED))).status == (await get(path[:-1], keys=api_keys(LOCKED))).status


async def test_the_root_says_what_this_is_and_where_to_go() -> None:
    about = (await get("/", headers={"accept": "application/json"}, version="1.2")).json()
    assert (about["name"], about["version"]) == ("penstock", "1.2")
    for each in (*about["openai"], *about["ranking"], *about["server"]):
        method, path = each.split()
        assert method in (ROUTES[path.replace("{name}", "tiny")], "DELETE", "GET", "POST", "PUT")
    text = await get("/", headers={"accept": "*/*"}, version="1.2")
    assert text.headers["content-type"].startswith("text/plain")
    shown = text.bodies[0].decode()
    assert len(shown.splitlines()) < 10
    assert shown.startswith("penstock 1.2")
    assert all(route in shown for route in about["openai"])


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-123_X.y", "abc-123_X.y"),
        ("a b\r\nSet-Cookie: x", "abSet-Cookie:x"),
        ("é" * 5 + "ok", "ok"),
        ("x" * 500, "x" * 128),
    ],
)
async def test_request_id_is_cleaned_and_echoed(given: str, echoed: str) -> None:
    assert (await get("/health", headers={"X-Request-Id": given})).headers["x-request-id"] == echoed


async def test_request_id_is_made_where_none_is_given() -> None:
    ids = {
        (await get("/nowhere", headers=headers)).headers["x-request-id"] for headers in ({}, {}, {"x-request-id": "\t"})
    }
    assert len(ids) == 3
    assert all(len(each) == 32 for each in ids)


async def test_a_dead_engine_fails_health_and_a_drain_fails_readiness() -> None:
    dataplane = FakeDataPlane()
    drain = DrainState()
    app = build_app(dataplane, AppSettings(drain=drain))

    async def statuses() -> list[int]:
        return [(await call(app, path, method="GET")).status for path in ("/health", "/health/live", "/health/ready")]

    assert await statuses() == [200, 200, 200]
    dataplane.models.is_ready = False
    assert await statuses() == [200, 200, 503]
    dataplane.models.is_ready, dataplane.models.is_live = True, False
    assert await statuses() == [503, 503, 200]
    dataplane.models.is_live = True
    drain.begin()
    assert await statuses() == [200, 200, 503]


async def test_metrics_and_version() -> None:
    for path in ("/metrics", "/metrics/"):
        result = await get(path)
        assert (result.bodies, result.headers["content-type"]) == ([b"penstock_up 1\n"], "text/plain; version=0.0.4")
    assert (await get("/version", version="1.2")).json() == {"version": "1.2", "runners": {"tiny": "scripted"}}


async def test_metrics_port_serves_metrics_and_health_alone() -> None:
    app = build_metrics_app(FakeDataPlane(), AppSettings(metrics=metrics))
    for path, method in ROUTES.items():
        expected = 200 if path.startswith(("/metrics", "/health")) or path == "/" else 404
        assert (await call(app, path, method=method)).status == expected, path


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("accept", "content_type", "begin"),
    [
        ("*/*", "text/plain; charset=utf-8", "penstock 1.2: "),
        ("text/html,*/*;q=0.8", "text/html; charset=utf-8", "<!doctype html>"),
        ("application/json", "application/json", '{"name":"penstock","version":"1.2"'),
    ],
)
async def test_the_root_answers_in_the_form_that_the_client_accepts(
    accept: str, content_type: str, begin: str, method: str
) -> None:
    answer = await get("/", method=method, headers={"accept": accept}, version="1.2")
    assert (answer.status, answer.headers["content-type"]) == (200, content_type)
    text = b"".join(answer.bodies).decode()
    assert text.startswith(begin)
    for word in ("/v1/models", "/openapi.json", "/health/ready", DOCUMENTATION):
        assert word in text


async def test_the_root_of_the_metrics_port_has_its_own_routes() -> None:
    app = build_metrics_app(FakeDataPlane(), AppSettings(metrics=metrics, version="1.2"))
    about = (await call(app, "/", method="GET", headers={"accept": "application/json"})).json()
    assert set(about) == {"name", "version", "description", "documentation", "server"}
    assert "GET /metrics" in about["server"]


@pytest.mark.parametrize("build", [build_app, build_metrics_app])
async def test_the_root_of_a_server_with_keys_says_its_name_alone(build: Callable[..., ASGIApp]) -> None:
    app = build(FakeDataPlane(), AppSettings(keys=api_keys(LOCKED), version="1.2"))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer key-one"}):
        answer = await call(app, "/", method="GET", headers={"accept": "application/json", **headers})
        assert answer.json() == {"name": "penstock", "documentation": DOCUMENTATION}
        text = b"".join((await call(app, "/", method="GET", headers=headers)).bodies).decode()
        assert text == f"penstock\n\ndocumentation: {DOCUMENTATION}\n"


def test_the_documentation_is_where_the_distribution_says() -> None:
    about = tomllib.loads((Path(__file__).parents[5] / "pyproject.toml").read_text())
    assert about["project"]["urls"]["Documentation"] == DOCUMENTATION


async def test_unexpected_error_is_logged_once_and_told_without_details(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(name_request)
    dataplane = FakeDataPlane()
    dataplane.admit = KeyError("/secret/path")
    result = await call(build_app(dataplane, AppSettings()), "/v1/completions", {"model": "tiny", "prompt": "hi"})
    assert result.status == 500
    assert b"secret" not in b"".join(result.bodies)
    assert result.json()["error"]["type"] == "server_error"
    assert len(caplog.records) == 1
    assert "KeyError" in caplog.text
    assert caplog.records[0].request == f" (request {result.headers['x-request-id']})"


def classes(cls: type[tree.PenstockError] = tree.PenstockError) -> list[type[tree.PenstockError]]:
    return [
        cls,
        *(leaf for child in cls.__subclasses__() if child.__module__ == tree.__name__ for leaf in classes(child)),
    ]


@pytest.mark.parametrize("cls", classes())
def test_every_error_has_a_shape(cls: type[tree.PenstockError]) -> None:
    import grpc

    shape = wire_shape(cls("message"))
    assert 400 <= shape.status < 600
    keys = tree.AuthenticationError | tree.PermissionDeniedError | tree.RateLimitedError
    callers = tree.InvalidRequestError | tree.CancelledError | tree.UnknownError | keys
    assert (shape.status < 500) == issubclass(cls, callers)
    assert hasattr(grpc.StatusCode, shape.grpc)
    retry = [value for name, value in error_headers(cls("message")) if name == b"retry-after"]
    assert bool(retry) == issubclass(cls, tree.OverloadedError)


@pytest.mark.parametrize(("given", "told"), [(None, b"1"), (0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (7.1, b"8")])
def test_retry_after_is_whole_seconds(given: float | None, told: bytes) -> None:
    assert error_headers(tree.QueueFullError("full", retry_after=given)) == [(b"retry-after", told)]


@pytest.mark.parametrize("char", ["a", "\0", "é", "😀", '"', "\\"])
def test_error_bodies_stay_small(char: str) -> None:
    assert len(error_json(tree.InvalidRequestError(char * 100_000, param=char * 100_000))) <= 4096


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("BaseHTTPMiddleware", "below it a handler never sees its client leave"),
        ("StreamingResponse", "the token path writes its own frames"),
        ("request.url", "it is rebuilt from the Host header, which the caller chooses"),
    ],
)
def test_sources_keep_away_from(word: str, why: str) -> None:
    room = Path(penstock.gateway.server.ports.http_apps.__file__).parents[1]
    users = [path.name for path in room.rglob("*.py") if word in path.read_text()]
    assert users == [], why


async def test_keys_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    dataplane = FakeDataPlane()
    dataplane.admit = RuntimeError("broken")
    app = build_app(dataplane, AppSettings(keys=api_keys(LOCKED)))
    for value in ("Bearer key-one", "Bearer key-wrong"):
        headers = {"authorization": value}
        await call(app, "/v1/completions", {"model": "tiny", "prompt": "hi"}, headers=headers)
    assert "broken" in caplog.text
    assert "key-" not in caplog.text


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_adapters_stay_as_they_are_unless_the_server_allows_it(path: str) -> None:
    app = build_app(FakeDataPlane(), AppSettings())
    refused = await call(app, path, {"lora_name": "x", "lora_path": "x"})
    error = refused.json()["error"]
    assert (refused.status, error["code"]) == (403, "lora_directory_not_set")
    assert "--lora-directory" in error["message"]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_adapters_stay_as_they_are_while_draining(path: str) -> None:
    drain = DrainState()
    drain.begin()
    refused = await call(build_app(FakeDataPlane(), AppSettings(drain=drain)), path, {"lora_name": "x"})
    assert (refused.status, refused.json()["error"]["code"]) == (503, "not_ready")
