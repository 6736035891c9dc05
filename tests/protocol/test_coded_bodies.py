"""Bodies as curl, PowerShell and compressing clients send them, over real sockets: also through a front."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.gateway.models.language.models import find_model
from support.server import Server, serving

ASK = {"model": "m", "prompt": "hello", "max_tokens": 2}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False, "options": {"num_predict": 2}}
MARK = b"\xef\xbb\xbf"
LIMIT = 8 << 20


@pytest.fixture(scope="module", params=[(), ("--fronts", "2")], ids=["one process", "fronts"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    simulated = (str(find_model(None).folder), "--engine", "simulated", "--served-model-name", "m")
    with serving(*simulated, "--access-log", "off", *request.param) as running:
        yield running


def packed(coding: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    return gzip.compress(text) if coding == "gzip" else zlib.compress(text)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("http2", [False, True])
def test_compressed_requests(server: Server, coding: str, http2: bool) -> None:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    with httpx.Client(base_url=server.url, http1=not http2, http2=http2, timeout=60) as client:
        for path, body in (
            ("/v1/completions", ASK),
            ("/v1/completions", ASK | {"user": "x" * 100_000}),
            ("/v1/chat/completions", {"model": "m", "messages": CHAT["messages"], "max_tokens": 2, "store": True}),
            ("/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 2}),
            ("/api/chat", CHAT),
        ):
            answer = client.post(path, content=packed(coding, body), headers=headers)
            assert answer.status_code == 200, answer.text


def test_a_compressed_stream_in_pieces(server: Server) -> None:
    """Chunks, none of which is worth anything alone, and a stream as the answer."""
    body = packed("gzip", ASK | {"stream": True})
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    pieces = (body[at : at + 5] for at in range(0, len(body), 5))
    with httpx.stream("POST", server.url + "/v1/completions", content=pieces, headers=headers, timeout=60) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_bomb_costs_no_more_than_the_limit(server: Server) -> None:
    bomb = gzip.compress(bytes(64 * LIMIT), 9)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=bomb, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert server.post("/v1/completions", ASK).status_code == 200


def test_a_byte_order_mark(server: Server) -> None:
    for coded, headers in ((bytes, {}), (gzip.compress, {"content-encoding": "gzip"})):
        body = coded(MARK + json.dumps(ASK).encode())
        answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/api/show"])
def test_what_programs_say_of_themselves(server: Server, path: str) -> None:
    """urllib, as curl -d, calls every body a form. Nothing else is said there that a browser would say."""
    body = json.dumps(CHAT | {"store": True} if path.startswith("/v1") else CHAT).encode()
    request = urllib.request.Request(server.url + path, body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_s_own_content_type_and_gzip_are_accepted(server: Server, tmp_path: Path) -> None:
    (tmp_path / "body.gz").write_bytes(packed("gzip", ASK))
    compressed = ("-H", "Content-Encoding: gzip", "-H", "Content-Type: application/json")
    for path, *options in (
        ("/api/chat", "-d", json.dumps(CHAT)),
        ("/v1/completions", "-d", json.dumps(ASK)),
        ("/v1/completions", *compressed, "--data-binary", f"@{tmp_path / 'body.gz'}"),
    ):
        command = ["curl", "-sS", "-w", "%{http_code}", "-o", str(tmp_path / "out"), *options, server.url + path]
        assert subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout == "200"
