"""Models that sleep and wake up on a running server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import httpx
import pytest

from support.server import Server, serving

CHAT = {"model": "penstock-demo", "messages": [{"role": "user", "content": "What does len do? " * 20}], "max_tokens": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def told(server: Server, path: str) -> httpx.Response:
    return httpx.post(server.url + path, timeout=60)


def seen(server: Server, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=60)


def chat(server: Server) -> httpx.Response:
    return server.post("/v1/chat/completions", CHAT | {"temperature": 0})


def cached_tokens(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def sleeps(server: Server) -> bool:
    return bool(seen(server, "/is_sleeping").json()["is_sleeping"])


def test_sleep_and_wake_up(server: Server) -> None:
    before = chat(server)
    assert before.status_code == 200
    assert told(server, "/sleep?level=1&mode=wait").status_code == 200
    assert sleeps(server)
    refused = chat(server)
    assert refused.status_code == 503
    assert "/wake_up" in refused.json()["error"]["message"]
    assert seen(server, "/health/ready").status_code == 503
    assert seen(server, "/health/live").status_code == 200
    assert 'penstock_engine_asleep{model="penstock-demo"} 1.0' in seen(server, "/metrics").text
    assert told(server, "/wake_up").status_code == 200
    assert not sleeps(server)
    assert seen(server, "/health/ready").status_code == 200
    assert chat(server).json()["choices"] == before.json()["choices"]


def test_the_prefix_cache_is_emptied(server: Server) -> None:
    chat(server)
    assert cached_tokens(chat(server)) > 0
    assert told(server, "/reset_prefix_cache").status_code == 200
    assert cached_tokens(chat(server)) == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/sleep?level=3", 400),
        ("/sleep?mode=keep", 400),
        ("/wake_up?tags=weights", 400),
        ("/reset_prefix_cache?model=nobody", 404),
    ],
)
def test_what_is_refused(server: Server, path: str, status: int) -> None:
    assert told(server, path).status_code == status
    assert not sleeps(server)


def test_an_idle_model_sleeps_until_the_next_request() -> None:
    with serving("--sleep-idle-seconds", "3600") as server:
        first = chat(server)
        [running] = seen(server, "/api/ps").json()["models"]
        assert running["expires_at"] > "2026"
        unload = server.post("/api/generate", {"model": "penstock-demo", "keep_alive": 0})
        assert unload.json()["done_reason"] == "unload"
        deadline = time.monotonic() + 60
        while not sleeps(server):
            assert time.monotonic() < deadline, "it does not fall asleep"
        assert seen(server, "/api/ps").json()["models"] == []
        assert seen(server, "/health/ready").status_code == 200
        kept = server.post("/api/chat", {"model": "penstock-demo", "messages": [], "keep_alive": "10m"})
        assert kept.json()["done_reason"] == "load"
        [running] = seen(server, "/api/ps").json()["models"]
        assert 500 < datetime.fromisoformat(running["expires_at"]).timestamp() - time.time() < 700
        assert not sleeps(server)
        assert chat(server).json()["choices"] == first.json()["choices"]
        server.post("/api/chat", {"model": "penstock-demo", "messages": [], "keep_alive": "999999999h"})
        [running] = seen(server, "/api/ps").json()["models"]
        assert running["expires_at"] == "9999-12-31T23:59:59Z"
