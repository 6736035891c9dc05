"""A streaming client that costs little: raw bytes on an asyncio protocol, parsed after the run."""

from __future__ import annotations

import asyncio
import json
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit


class SSEStream(asyncio.Protocol):
    """One POST whose answer is a stream of server-sent events. `done` resolves when the server closes it."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reads: list[tuple[float, bytes]] = []
        """(time, bytes) of everything that arrived, the head of the response included."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("an SSE stream needs a stream transport")
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads.append((perf_counter(), data))
        self._tail = self._tail[-16:] + data[-64:]
        if b"data: [DONE]" in self._tail and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def abort(self) -> None:
        """Disconnects the hard way."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.reads)

    @property
    def status(self) -> int:
        head = self.body.split(b" ", 2)
        return int(head[1]) if len(head) > 1 else 0


def request_bytes(url: str, path: str, body: dict[str, Any], api_key: str | None = None) -> tuple[str, int, bytes]:
    """(host, port, the whole HTTP/1.1 request)."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(data)}",
    ]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    return host, port, "\r\n".join([*lines, "", ""]).encode() + data


async def open_stream(url: str, path: str, body: dict[str, Any], api_key: str | None = None) -> SSEStream:
    """Connects and sends; await `done` for the end."""
    host, port, request = request_bytes(url, path, body, api_key)
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: SSEStream(request), host, port)
    return stream
