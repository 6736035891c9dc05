"""What the flags for HTTP clients change, on one server process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_server import Server, serving
from protocol.raw_http import connect, receive_all, status


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--engine", "simulated", "--served-model-name", "m", "--keep-alive", "0.3") as process:
        yield process


@pytest.mark.parametrize("port", ["url", "operator"])
def test_idle_connections_are_closed_after_keep_alive(server: Server, port: str) -> None:
    with connect(int(getattr(server, port).rpartition(":")[2])) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = receive_all(client)
    assert status(answer) == 200
    assert b"connection: close" not in answer.lower()
