"""HTTP by hand over a socket, for clients that misbehave."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

TIMEOUT = 60.0


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(TIMEOUT)
    client.connect(("127.0.0.1", port))
    return client


def post(body: dict[str, Any] | bytes, path: str = "/v1/completions", *headers: bytes) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: localhost", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


def receive_all(client: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as a close."""
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def receive_until(client: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        part = client.recv(65536)
        assert part, f"closed before {mark!r}: {received!r}"
        received += part
    return received


def read_slowly(client: socket.socket, pause: float = 0.002) -> bytes:
    """The end of all that comes until the server closes. `pause`: seconds between two reads."""
    got = b""
    while part := client.recv(1 << 18):
        got = got[-100:] + part
        time.sleep(pause)
    return got


def status(response: bytes) -> int:
    assert response.startswith(b"HTTP/1.1 "), response[:100]
    return int(response[9:12])
