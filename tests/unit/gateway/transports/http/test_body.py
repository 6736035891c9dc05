"""How a body is read: its limit in two stages, its type and encoding."""

from __future__ import annotations

import gzip
import os
import threading
import zlib
from typing import Any

import pytest

from penstock.gateway.requests.browser_rules import BrowserRules
from penstock.gateway.requests.intake import BodyIntake
from penstock.gateway.server.ports.http_apps import App, build_app
from penstock.gateway.transports.http import compression, exchange
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane
from support.keys import api_keys

FORM = "application/x-www-form-urlencoded"
MARK = b"\xef\xbb\xbf"
SMALL = b'{"model":"tiny","prompt":"hi"}'


async def post(body: bytes | list[bytes], limit: int = 1000, **headers: str) -> AsgiCall:
    app = build_app(FakeDataPlane(), AppSettings(max_body_bytes=limit))
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await call(app, "/v1/completions", body, headers=names)


def padded(size: int) -> bytes:
    return SMALL + b" " * (size - len(SMALL))


@pytest.mark.parametrize(("size", "status"), [(999, 200), (1000, 200), (1001, 413)])
async def test_limit_counts_what_arrives(size: int, status: int) -> None:
    assert (await post(padded(size))).status == status
    pieces = [padded(size)[at : at + 7] for at in range(0, size, 7)]
    assert (await post(pieces)).status == status
    assert (await post(padded(size), content_length="5")).status == status


async def test_content_length_over_the_limit_is_refused_unread() -> None:
    app = build_app(FakeDataPlane(), AppSettings(max_body_bytes=1000))
    request = AsgiCall(app, "/v1/completions", SMALL, headers={"content-length": "1001"})
    await request.run()
    assert request.status == 413
    assert request.json()["error"]["code"] == "payload_too_large"
    assert request.unread == 1


@pytest.mark.parametrize("length", ["-1", "+5", "5.0", "1e3", "0x5", "", " ", "a", "9" * 5000, "٣"])
async def test_content_length_must_be_a_number(length: str) -> None:
    answer = await post(SMALL, content_length=length)
    assert answer.status == 400
    assert answer.json()["error"]["message"] == "Content-Length is not a number."


@pytest.mark.parametrize(
    ("encoding", "status"),
    [
        ("zstd", 415),
        ("br", 415),
        ("identity, gzip", 415),
        ("gzip, gzip", 415),
        ("identity", 200),
        ("Identity", 200),
    ],
)
async def test_content_encoding(encoding: str, status: int) -> None:
    assert (await post(SMALL, content_encoding=encoding)).status == status


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 200),
        ("Application/X-WWW-Form-Urlencoded; charset=utf-8", 200),
        ("application/x-www-form-urlencoded, text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_content_type(kind: str, status: int) -> None:
    assert (await post(SMALL, content_type=kind)).status == status


INFERRING = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/embeddings", "/embed", "/v1/embed", "/v2/embed", "/rerank", "/v1/rerank"),
    *("/v2/rerank", "/score", "/v1/score", "/classify", "/v1/classify", "/pooling", "/tokenize", "/detokenize"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
}


async def test_only_what_infers_takes_json_that_curl_has_called_a_form() -> None:
    app = build_app(FakeDataPlane(), AppSettings())
    assert isinstance(app, App)
    taken = set()
    for route in app.routes.all:
        if route.method in ("POST", "PUT"):
            done = await call(app, route.path, b"{", method=route.method, headers={"content-type": FORM})
            if done.status == 400 and "JSON" in str(done.json()):
                taken.add(route.path)
    assert taken == INFERRING | {"/api/pull"}  # which only tells what is there


OF_BROWSERS = [
    {"origin": "http://evil.example"},
    {"origin": "null"},  # a page of file://, or of a frame in a sandbox
    {"origin": "http://localhost:8000"},
    {"sec-fetch-site": "none"},
    {"sec-fetch-mode": "no-cors"},
    {"sec-ch-ua": "x"},
    {"referer": "http://evil.example/"},
    {"accept-language": "en"},  # an old browser, which says no origin of a request without CORS
    {"accept-language": ""},  # a page may set it, and cannot take it away
    {"cookie": "a=b"},
]


@pytest.mark.parametrize("headers", OF_BROWSERS)
@pytest.mark.parametrize("keys", [{}, {"red": "key"}])
async def test_a_form_of_a_browser_is_no_json(headers: dict[str, str], keys: dict[str, str]) -> None:
    """Whatever a page may send without a preflight, also where the browser guard lets it in."""
    dataplane: Any = FakeDataPlane()
    settings = AppSettings(keys=api_keys(keys), browsers=BrowserRules(origins=frozenset({"http://evil.example"})))
    given = {"content-type": FORM, "authorization": "Bearer key", **headers}
    done = await call(build_app(dataplane, settings), "/v1/completions", SMALL, headers=given)
    assert done.status in (403, 415)
    assert dataplane.requests == []


@pytest.mark.parametrize("kind", ["application/json", None])
async def test_a_byte_order_mark_is_no_part_of_the_json(kind: str | None) -> None:
    headers = {} if kind is None else {"content_type": kind}
    assert (await post(MARK + SMALL, **headers)).status == 200
    assert (await post([MARK[:1], MARK[1:], SMALL], **headers)).status == 200
    assert (await post(gzip.compress(MARK + SMALL, mtime=0), content_encoding="gzip", **headers)).status == 200
    for wrong, error in (
        (MARK + MARK + SMALL, "is not valid JSON"),
        (SMALL + MARK, "is not valid JSON"),
        (MARK, "is not valid JSON"),
        ("\ufeff".encode("utf-16-le") + SMALL, "is not valid UTF-8"),
    ):
        answer = await post(wrong, **headers)
        assert answer.status == 400
        assert error in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress(SMALL, mtime=0)),
        ("GZip", gzip.compress(SMALL[:7], mtime=0) + gzip.compress(SMALL[7:], mtime=0)),
        ("deflate", zlib.compress(SMALL)),
        (" gzip ", gzip.compress(padded(1000), mtime=0)),
    ],
)
async def test_compressed_bodies(coding: str, packed: bytes) -> None:
    assert (await post(packed, content_encoding=coding)).status == 200
    assert (await post([packed[at : at + 3] for at in range(0, len(packed), 3)], content_encoding=coding)).status == 200


@pytest.mark.parametrize(
    "packed", [SMALL, b"", gzip.compress(SMALL, mtime=0)[:-1], gzip.compress(SMALL, mtime=0) + SMALL]
)
async def test_broken_compressed_bodies(packed: bytes) -> None:
    done = await post(packed, content_encoding="gzip")
    assert (done.status, "gzip" in done.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413), (4 << 20, 413)])
async def test_the_limit_is_that_of_the_decompressed_body(size: int, status: int) -> None:
    assert (await post(gzip.compress(padded(size)), limit=1000, content_encoding="gzip")).status == status


async def test_what_is_compressed_counts_as_well_as_what_it_becomes() -> None:
    assert (await post(gzip.compress(os.urandom(1000)), limit=1000, content_encoding="gzip")).status == 413


async def test_the_work_of_a_body_is_judged_by_what_it_becomes() -> None:
    """Pools of threads bound what waits for them by this."""
    dataplane: Any = FakeDataPlane()
    body = gzip.compress(padded(900))
    await call(build_app(dataplane, AppSettings()), "/v1/completions", body, headers={"content-encoding": "gzip"})
    assert dataplane.requests[0].context.record.bytes_in == 900


async def test_decompressed_bodies_count_in_the_memory_of_all_bodies() -> None:
    settings = AppSettings(max_body_bytes=1 << 20, intake=BodyIntake(body_bytes=300_000))
    app = build_app(FakeDataPlane(), settings)
    for size, status in ((200_000, 200), (400_000, 503)):
        body, headers = gzip.compress(padded(size)), {"content-encoding": "gzip"}
        assert (await call(app, "/v1/completions", body, headers=headers)).status == status
        assert settings.intake.bodies.held == 0


async def test_long_bodies_are_decompressed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def decompress(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return compression.decompress(*given)

    monkeypatch.setattr(exchange, "decompress", decompress)
    incompressible = SMALL[:-1] + b',"user":"%s"}' % os.urandom(2000).hex().encode()
    for body in (SMALL, incompressible):
        assert (await post(gzip.compress(body, mtime=0), limit=9000, content_encoding="gzip")).status == 200
    assert [name.startswith("penstock-tensor") for name in threads] == [False, True]


async def test_default_limit_is_8_mib() -> None:
    assert AppSettings().max_body_bytes == 8 * 1024 * 1024


async def test_client_that_leaves_amid_its_body_gets_nothing() -> None:
    dataplane: Any = FakeDataPlane()
    settings = AppSettings()
    request = AsgiCall(build_app(dataplane, settings), "/v1/completions", [b"{", None])
    await request.run()
    assert request.messages == []
    assert dataplane.requests == []
    assert settings.drain.in_flight == 0
