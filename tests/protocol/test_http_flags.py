"""What the flags for HTTP clients change, on one server process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from openai import OpenAI

from protocol.conftest import Serve
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from protocol.raw_http import connect, receive_all, status
from support.server import Server, serving, wait_until

FLAGS = (
    *("--engine", "simulated", "--served-model-name", "m", "--max-model-len", "4096", "--sim-step-ms", "10"),
    *("--max-num-seqs", "2", "--max-queued-requests", "2", "--sim-faults", "slow=1000:1"),
    *("--keep-alive", "0.3", "--clamp-max-tokens", "--heartbeat-s", "0.2"),
)
LONG = {"model": "m", "prompt": [[300]], "max_tokens": 4000, "ignore_eos": True}
HEARTBEAT = ": keep-alive"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS) as process:
        yield process


@pytest.mark.parametrize("port", ["url", "operator"])
def test_idle_connections_are_closed_after_keep_alive(server: Server, port: str) -> None:
    with connect(int(getattr(server, port).rpartition(":")[2])) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = receive_all(client)
    assert status(answer) == 200
    assert b"connection: close" not in answer.lower()


def num_tokens(server: Server, text: str) -> int:
    answer = server.post("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 1}).json()
    return int(answer["usage"]["prompt_tokens"])


def test_tokens_beyond_the_context_are_clamped_in_both_protocols(server: Server) -> None:
    words = "one two three four five " * 10
    text = words * (4000 // num_tokens(server, words))
    room = 4096 - num_tokens(server, text)
    asked = {"max_tokens": 5000, "ignore_eos": True}
    clamped = server.post("/v1/completions", {"model": "m", "prompt": text, **asked}).json()
    assert clamped["usage"]["completion_tokens"] == room
    generate = {"text_input": text, "return_num_output_tokens": True, **asked}
    assert server.post("/v2/models/m/generate", generate).json()["num_output_tokens"] == room


def lines(server: Server, path: str, body: dict[str, Any], heard: threading.Event | None = None) -> list[str]:
    """Of a whole stream, with its comments; `heard` is set at the first of these."""
    received = []
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            received.append(line)
            if heard is not None and line == HEARTBEAT:
                heard.set()
    return [line for line in received if line]


def test_a_stream_in_the_queue_gets_heartbeats_and_what_is_refused_its_status(server: Server) -> None:
    heard = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        with ExitStack() as seats:
            running = [seats.enter_context(server.stream("/v1/completions", LONG)) for _ in range(2)]
            for events in running:
                next(events)
            generate = pool.submit(lines, server, "/v2/models/m/generate_stream", {"text_input": "hi", "max_tokens": 2})
            wait_until(lambda: server.state()["num_waiting"] == 1)
            queued = pool.submit(lines, server, "/v1/completions", LONG | {"max_tokens": 2}, heard)
            wait_until(lambda: server.state()["num_waiting"] == 2)
            refused = server.post("/v1/completions", LONG | {"stream": True})
            assert heard.wait(30)
        received, plain = queued.result(), generate.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert "retry-after" in refused.headers
    assert received[0] == HEARTBEAT
    *_, last, done = received
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert done == "data: [DONE]"
    assert plain
    assert all(line.startswith("data: ") for line in plain)


def test_a_gap_between_tokens_gets_heartbeats(server: Server) -> None:
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
        received = response.iter_lines()
        next(line for line in received if line.startswith("data: "))
        server.post("/v1/completions", {"model": "m", "prompt": [1000], "max_tokens": 1})  # makes a step of a second
        assert HEARTBEAT in received


def test_the_sdk_passes_over_heartbeats(serve: Serve) -> None:
    steps: list[Step] = [[], [delta(0, "a")], [], [delta(0, "b", "stop")]]
    port = serve(FakeDataPlane(lambda _: steps)).port
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.completions.create(model="tiny", prompt="hi", stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "b"]
