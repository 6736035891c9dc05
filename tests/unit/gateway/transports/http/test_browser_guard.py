"""A server that asks for no key refuses what a foreign web page can have sent, in each protocol's words."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.requests.browser_rules import BrowserRules
from penstock.gateway.server.ports.http_apps import build_app, build_metrics_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane
from support.keys import api_keys
from support.kserve import FakeModelStore
from support.kserve_http import kserve_context

HERE = "127.0.0.1:8000"
LOOPBACK = BrowserRules()


async def asked(
    path: str = "/v1/models",
    method: str = "GET",
    *,
    rules: BrowserRules = LOOPBACK,
    keys: dict[str, str] | None = None,
    **headers: str,
) -> AsgiCall:
    """Headers' names have _ for -."""
    app = build_app(
        FakeDataPlane(), AppSettings(browsers=rules, keys=api_keys(keys or {})), kserve_context(FakeModelStore())
    )
    return await call(app, path, b"{", method=method, headers={k.replace("_", "-"): v for k, v in headers.items()})


def code(answer: AsgiCall) -> Any:
    return answer.json()["error"]["code"] if answer.status == 403 else answer.status


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "127.0.0.1",
        "127.9.9.9:1",
        "[::1]",
        "[::1]:8000",
        "[::ffff:127.0.0.1]",
    ],
)
async def test_loopback_is_always_a_name_of_the_server(host: str) -> None:
    assert (await asked(host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "evil.example/127.0.0.1",
        "127.0.0.1, evil.example",
        "[::1].evil.example",
        "[localhost]",
        "[",
        "0177.0.0.1.",
        "192.168.1.5",
        "0.0.0.0:8000",
        "[2001:db8::1]",
        "::1",
        "",
        "\xff",
    ],
)
@pytest.mark.parametrize(("path", "method"), [("/v1/models", "GET"), ("/v2", "GET"), ("/v2/models/m/infer", "POST")])
async def test_under_other_names_nothing_is_told(host: str, path: str, method: str) -> None:
    answer = await asked(path, method, host=host)
    assert answer.status == 403
    assert "--allowed-hosts" in str(answer.json())


@pytest.mark.parametrize("host", ["192.168.1.5:8000", "[2001:db8::1]", "0.0.0.0", "127.0.0.1", "localhost"])
async def test_a_port_for_other_machines_answers_to_every_address(host: str) -> None:
    rules = BrowserRules(any_address=True)
    assert (await asked(rules=rules, host=host)).status == 200
    assert code(await asked(rules=rules, host="evil.example")) == "host_not_allowed"


@pytest.mark.parametrize("host", ["gpu-box", "GPU-box.:8000", "10.0.0.7", "[2001:DB8:0::1]:80"])
async def test_the_server_answers_to_what_it_was_told(host: str) -> None:
    rules = BrowserRules(hosts=frozenset({"gpu-box", "10.0.0.7", "2001:db8::1"}))
    assert (await asked(rules=rules, host=host)).status == 200
    assert code(await asked(rules=rules, host="10.0.0.8")) == "host_not_allowed"


async def test_a_client_without_a_host_is_no_browser_and_one_with_two_is_wrong() -> None:
    assert (await asked()).status == 200
    request = AsgiCall(build_app(FakeDataPlane(), AppSettings()), "/v1/models", method="GET", headers={"host": HERE})
    request._scope["headers"].append((b"host", b"evil.example"))
    answer = await request.run()
    assert answer.status == 400
    assert answer.json()["error"]["message"] == "Host is given more than once."


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"])
async def test_health_answers_to_any_name(path: str) -> None:
    answer = await asked(path, host="10.1.2.3:8000", origin="http://evil.example")
    assert answer.status in (200, 503)


REFUSED = [
    {"origin": "http://evil.example"},
    {"origin": "http://evil.example", "sec_fetch_site": "cross-site"},
    {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
    {"origin": "http://127.0.0.1:3000"},
    {"origin": "http://127.0.0.1"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "127.0.0.1:8000"},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"sec_fetch_site": ""},
    {"sec_fetch_site": "Same-Origin, cross-site"},
    {"origin": f"http://{HERE}", "sec_fetch_site": "cross-site"},
]
ADMITTED = [
    {},
    {"origin": f"http://{HERE}"},
    {"origin": f"https://{HERE}", "sec_fetch_site": "same-origin"},
    {"origin": "https://behind-a-proxy.example", "sec_fetch_site": "same-origin"},
    {"sec_fetch_site": "none"},
    {"sec_fetch_mode": "cors"},  # fetch in Node says only this
]


@pytest.mark.parametrize("headers", REFUSED)
@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/x-www-form-urlencoded"])
async def test_posts_of_other_origins_are_refused_in_the_caller_s_protocol(headers: dict[str, str], kind: str) -> None:
    openai = await asked("/v1/completions", "POST", host=HERE, content_type=kind, **headers)
    assert (openai.status, code(openai)) == (403, "origin_not_allowed")
    assert openai.json()["error"]["type"] == "invalid_request_error"
    kserve = await asked("/v2/repository/models/m/load", "POST", host=HERE, content_type=kind, **headers)
    assert kserve.status == 403
    assert list(kserve.json()) == ["error"]
    assert "--allowed-origins" in kserve.json()["error"]


@pytest.mark.parametrize("headers", ADMITTED)
async def test_own_pages_and_programs_may_post(headers: dict[str, str]) -> None:
    for path in ("/v1/completions", "/v2/logging"):
        answer = await asked(path, "POST", host=HERE, content_type="application/json", **headers)
        assert answer.status == 400
        assert "is not valid JSON" in str(answer.json()["error"]), "it is read"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
async def test_all_but_reading_is_refused(method: str) -> None:
    assert (await asked(method=method, host=HERE, **REFUSED[0])).status == 403


@pytest.mark.parametrize("headers", REFUSED)
async def test_a_page_may_ask_for_what_it_cannot_read(headers: dict[str, str]) -> None:
    answer = await asked(host=HERE, **headers)
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_an_allowed_origin_may_post() -> None:
    rules = BrowserRules(origins=frozenset({"http://localhost:3000"}))

    async def status(origin: str) -> int:
        answer = await asked(
            "/v1/completions", "POST", rules=rules, host=HERE, origin=origin, sec_fetch_site="cross-site"
        )
        return answer.status

    assert await status("http://localhost:3000") == 400
    assert await status("http://localhost:3001") == 403
    assert await status("https://localhost:3000") == 403


async def test_an_allowed_origin_does_not_make_up_for_a_foreign_name() -> None:
    rules = BrowserRules(origins=frozenset({"http://localhost:3000"}))
    answer = await asked("/v1/completions", "POST", rules=rules, host="evil.example", origin="http://localhost:3000")
    assert code(answer) == "host_not_allowed"


async def test_with_keys_the_key_decides() -> None:
    keys = {"red": "key"}
    headers = {"host": "evil.example", "origin": "http://evil.example", "sec_fetch_site": "cross-site"}
    assert (await asked("/v1/models", keys=keys, **headers)).status == 401
    assert (await asked("/v1/models", keys=keys, authorization="Bearer key", **headers)).status == 200
    answer = await asked("/v2/repository/models/m/load", "POST", keys=keys, **headers)
    assert answer.status == 401


async def test_the_metrics_port_has_the_same_guard() -> None:
    app = build_metrics_app(FakeDataPlane(), AppSettings())
    for host, status in ((HERE, 200), ("evil.example", 403)):
        assert (await call(app, "/metrics", method="GET", headers={"host": host})).status == status
        assert (await call(app, "/health", method="GET", headers={"host": host})).status == 200


async def test_hosts_without_end_are_not_remembered_without_end() -> None:
    app: Any = build_app(FakeDataPlane(), AppSettings())
    for number in range(1000):
        await call(app, "/v1/models", method="GET", headers={"host": f"h{number}.example"})
    assert app._access_control._guard._knows.cache_info().currsize <= 256
