"""How a body is read: its limit in two stages, its type and encoding."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.http.settings import AppSettings
from penstock.gateway.ports.http_apps import build_app
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane

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
    assert (await post(SMALL, content_length=length)).status == 400


@pytest.mark.parametrize(
    ("encoding", "status"),
    [
        ("gzip", 415),
        ("zstd", 415),
        ("br", 415),
        ("GZIP", 415),
        ("identity, gzip", 415),
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
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_content_type(kind: str, status: int) -> None:
    assert (await post(SMALL, content_type=kind)).status == status


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
