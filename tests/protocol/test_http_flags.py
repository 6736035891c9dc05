"""What the flags for HTTP clients change, on one server process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_server import Server, serving
from protocol.raw_http import connect, receive_all, status

FLAGS = ("--keep-alive", "0.3", "--clamp-max-tokens")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--engine", "simulated", "--served-model-name", "m", "--max-model-len", "64", *FLAGS) as process:
        yield process


@pytest.mark.parametrize("port", ["url", "operator"])
def test_idle_connections_are_closed_after_keep_alive(server: Server, port: str) -> None:
    with connect(int(getattr(server, port).rpartition(":")[2])) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = receive_all(client)
    assert status(answer) == 200
    assert b"connection: close" not in answer.lower()


def test_tokens_beyond_the_context_are_clamped_in_both_protocols(server: Server) -> None:
    prompt = server.post("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 1}).json()["usage"]
    room = 64 - prompt["prompt_tokens"]
    clamped = server.post("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 1000}).json()
    assert clamped["usage"]["completion_tokens"] == room
    generate = {"text_input": "hi", "max_tokens": 1000, "return_num_output_tokens": True}
    assert server.post("/v2/models/m/generate", generate).json()["num_output_tokens"] == room
