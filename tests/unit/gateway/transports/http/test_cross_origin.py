"""What answers tell browsers about pages of other origins."""

from __future__ import annotations

import pytest

from penstock.gateway.requests.browser_rules import BrowserRules
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, delta
from support.keys import api_keys
from support.kserve import FakeModelStore
from support.kserve_http import kserve_context

PAGE = "http://localhost:3000"
KEYS = {"red": "key"}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


async def asked(
    path: str,
    method: str = "GET",
    body: object = b"",
    *,
    origins: set[str] | None = None,
    keys: dict[str, str] | None = None,
    **headers: str,
) -> AsgiCall:
    rules = BrowserRules(origins=frozenset({PAGE} if origins is None else origins))
    dataplane = FakeDataPlane(lambda _: [[delta(0, "one", "stop")]])
    app = build_app(dataplane, AppSettings(browsers=rules, keys=api_keys(keys or {})), kserve_context(FakeModelStore()))
    return await call(app, path, body, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()})


def allowed(answer: AsgiCall) -> str | None:
    return answer.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("path", ["/v1/models", "/v2", "/health", "/v1/absent", "/v2/absent"])
async def test_every_answer_is_for_an_allowed_page_errors_too(path: str) -> None:
    answer = await asked(path, origin=PAGE)
    assert allowed(answer) == PAGE
    assert answer.headers["vary"] == "origin"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


async def test_a_stream_is_for_an_allowed_page() -> None:
    answer = await asked("/v1/completions", "POST", {"model": "tiny", "prompt": "a", "stream": True}, origin=PAGE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert allowed(answer) == PAGE


@pytest.mark.parametrize("headers", [{}, {"origin": "http://localhost:3001"}, {"origin": "null"}])
async def test_caches_are_told_that_answers_differ(headers: dict[str, str]) -> None:
    answer = await asked("/v1/models", **headers)
    assert (answer.status, allowed(answer), answer.headers["vary"]) == (200, None, "origin")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v2/models/m/infer", "/v1/absent"])
@pytest.mark.parametrize("keys", [KEYS, {}])
async def test_a_preflight_is_answered_without_a_key(path: str, keys: dict[str, str]) -> None:
    answer = await asked(path, "OPTIONS", keys=keys, origin=PAGE, **PREFLIGHT)
    assert (answer.status, b"".join(answer.bodies)) == (200, b"")
    assert allowed(answer) == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]


METHODS = [
    ("/v1/chat/completions", "GET, HEAD, POST"),
    ("/v1/chat/completions/chatcmpl-1", "DELETE, GET, HEAD, POST"),
    ("/v1/completions", "POST"),
    ("/v1/completions/", "POST"),
    ("/v1/responses/resp_1", "DELETE, GET, HEAD"),
    ("/v1/files/file-1", "DELETE, GET, HEAD"),
    ("/traffic/a/b", "DELETE, GET, HEAD, PUT"),
    ("/v2/rerank", "POST"),
    ("/v2", "GET"),
    ("/v2/models/m/infer", "POST"),
    ("/v2/models/a%2Fb/versions/1/config", "GET"),
    ("/v1/absent", "GET, HEAD, POST"),
    ("/v2/absent", "GET, HEAD, POST"),
]


@pytest.mark.parametrize(("path", "methods"), METHODS)
async def test_a_preflight_names_the_methods_of_its_path(path: str, methods: str) -> None:
    answer = await asked(path, "OPTIONS", origin=PAGE, **PREFLIGHT)
    assert (answer.status, answer.headers["access-control-allow-methods"]) == (200, methods)


async def test_a_preflight_of_another_page_is_refused() -> None:
    for keys, status in ((KEYS, 401), ({}, 403)):
        answer = await asked("/v1/completions", "OPTIONS", keys=keys, origin="http://evil.example", **PREFLIGHT)
        assert (answer.status, allowed(answer)) == (status, None)


async def test_what_is_no_preflight_goes_its_way() -> None:
    assert (await asked("/v1/models", "OPTIONS", origin=PAGE)).status == 405
    answer = await asked("/v1/models", origin=PAGE, keys=KEYS, **PREFLIGHT)
    assert (answer.status, allowed(answer)) == (401, PAGE)


async def test_with_keys_all_pages_may_be_allowed() -> None:
    answer = await asked("/v1/models", origins={"*"}, keys=KEYS, origin="null", authorization="Bearer key")
    assert (answer.status, allowed(answer)) == (200, "*")
    assert "vary" not in answer.headers
    preflight = await asked("/v1/models", "OPTIONS", origins={"*"}, keys=KEYS, origin="http://any.example", **PREFLIGHT)
    assert (preflight.status, allowed(preflight)) == (200, "*")


async def test_without_allowed_origins_nothing_is_said() -> None:
    answer = await asked("/v1/models", origins=set(), keys=KEYS, origin=PAGE, authorization="Bearer key")
    assert answer.status == 200
    assert not {"vary", "access-control-allow-origin"} & answer.headers.keys()
    assert (await asked("/v1/models", "OPTIONS", origins=set(), keys=KEYS, origin=PAGE, **PREFLIGHT)).status == 401
