"""Floods before any queue: what is refused, what memory they take, and what others notice."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from penstock.gateway.models.language.models import find_model
from support.server import Server, serving, wait_until

MIB = 1 << 20
BUDGET = 48 * MIB


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    simulated = (str(find_model(None).folder), "--engine", "simulated", "--served-model-name", "m")
    with serving(*simulated, "--body-memory", str(BUDGET), "--access-log", "off") as running:
        yield running


class Peak:
    """The gateway's resident memory while a block runs."""

    def __init__(self, server: Server) -> None:
        self._process = psutil.Process(server.process.pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.bytes = self.before = self._process.memory_info().rss

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


def flooded(server: Server, path: str, body: bytes, headers: dict[str, str], times: int) -> list[int]:
    """Statuses of so many at once, with a small request that is served among them."""

    def send(_: int) -> int:
        with httpx.Client(timeout=60) as client:
            try:
                return client.post(server.url + path, content=body, headers=headers).status_code
            except httpx.WriteError:  # refused before the body was sent, and the answer lost with the connection
                return 503

    with ThreadPoolExecutor(times) as pool:
        sent = [pool.submit(send, number) for number in range(times)]
        for _ in range(5):
            small = server.post("/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 2})
            assert small.status_code == 200
        return [each.result() for each in sent]


def held(server: Server) -> float:
    text = httpx.get(server.operator + "/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("penstock_body_bytes "))


def test_long_chats_are_refused_within_a_bounded_memory(server: Server) -> None:
    """24 times 7 MiB of digits, of which each alone took gigabytes to tokenize."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "0123456789" * (7 * MIB // 10)}]}
    body = json.dumps(chat).encode()
    with Peak(server) as peak:
        statuses = flooded(server, "/v1/chat/completions", body, {"content-type": "application/json"}, 24)
    assert set(statuses) == {400, 503}
    assert peak.bytes - peak.before < 8 * BUDGET
    wait_until(lambda: held(server) == 0)
    wait_until(lambda: peak.now() - peak.before < 2 * BUDGET)


def test_bodies_that_grow_when_they_are_decompressed(server: Server) -> None:
    body = gzip.compress(b" " * (60 * MIB))
    assert len(body) < 64 << 10
    headers = {"content-encoding": "gzip"}
    with Peak(server) as peak:
        statuses = flooded(server, "/v2/models/m/infer", body, headers, 30)
    assert set(statuses) <= {400, 503}
    assert peak.bytes - peak.before < 4 * BUDGET
    wait_until(lambda: held(server) == 0)
    assert "bodies" in httpx.get(server.operator + "/metrics").text


def test_clients_that_leave_while_their_bodies_are_decompressed(server: Server) -> None:
    """What a thread still decompresses then must not count for ever: other bodies would find no room."""
    body = gzip.compress(b" " * (40 * MIB))
    url, headers = httpx.URL(server.url + "/v2/models/m/infer"), {"content-encoding": "gzip"}
    head = (
        f"POST {url.path} HTTP/1.1\r\nhost: localhost\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    for _ in range(4):
        with socket.create_connection((url.host, url.port or 80)) as client:
            client.sendall(head.encode() + body)
    wait_until(lambda: held(server) == 0)
    answer = httpx.post(url, content=body, headers=headers, timeout=60)
    assert (answer.status_code, "is not valid JSON" in answer.text) == (400, True), answer.text


def test_many_prompts_in_one_call_do_not_hold_others_up(server: Server) -> None:
    call: dict[str, Any] = {"model": "m", "prompt": ["words " * 600] * 128, "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(lambda: httpx.post(server.url + "/v1/completions", json=call, timeout=60))
        while not many.done():
            assert httpx.get(server.url + "/health/live").status_code == 200
        assert many.result().status_code in (200, 400, 503)


def test_a_stopped_engine_has_no_endless_queue() -> None:
    limits = ("--max-num-seqs", "8", "--max-queued-requests", "16", "--watchdog-timeout", "60", "--ready-timeout", "30")
    with serving("--engine", "simulated", "--served-model-name", "m", *limits) as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        ask = {"model": "m", "prompt": [300], "max_tokens": 2}

        def send(_: int) -> int:
            return httpx.post(server.url + "/v1/completions", json=ask, timeout=60).status_code

        with ThreadPoolExecutor(80) as pool:
            sent = [pool.submit(send, number) for number in range(80)]
            wait_until(lambda: sum(each.done() for each in sent) >= 80 - 50)
            os.kill(engine, signal.SIGCONT)
            statuses = [each.result() for each in sent]
        assert statuses.count(503) >= 80 - 50
        assert statuses.count(200) >= 16
