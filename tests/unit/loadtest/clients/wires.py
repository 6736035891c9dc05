"""What clients are tried against: reads given by hand at times of our own, and a server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.loadtest.clients import http1
from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http1 import Connection
from penstock.loadtest.clients.http_client import HttpClient
from penstock.loadtest.clients.response import HttpResponse
from penstock.loadtest.messages import Answer, Call

OPTIONS = ClientOptions(url="http://127.0.0.1:1", model="m")
CALL = Call(index=0, prompt="hello", output_tokens=4)


def whole(body: bytes, *, status: str = "200 OK", fields: str = "") -> bytes:
    """A response of known length."""
    return f"HTTP/1.1 {status}\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return CHUNKED_HEAD + b"".join(map(chunk, pieces)) + LAST_CHUNK


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Wire(asyncio.Transport):
    """Takes everything, and sends nothing anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False
        self.unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


class Clock:
    """Each look at it is a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class ByHand:
    """Stands in for a pool: every request is answered by these reads. Read number n (from 1) comes at time n."""

    def __init__(self, reads: Sequence[bytes], *, lost: bool = False, cause: Exception | None = None) -> None:
        self.reads = reads
        self.lost = lost
        self.cause = cause
        self.wire = Wire()

    async def exchange(self, request: bytes) -> HttpResponse:
        connection = Connection()
        connection.connection_made(self.wire)
        clock = Clock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http1, "perf_counter", lambda: clock() - 1)
            waiting = asyncio.ensure_future(connection.exchange(request, 0.0))
            await asyncio.sleep(0)
            for read in self.reads:
                connection.data_received(read)
            if self.lost:
                connection.connection_lost(self.cause)
            return await asyncio.wait_for(waiting, 5)


async def answered(client: HttpClient, reads: Sequence[bytes], *, lost: bool = False, call: Call = CALL) -> Answer:
    """What the client makes of an answer that comes in these reads; `lost`: then the connection is closed."""
    client.pool = ByHand(reads, lost=lost)  # type: ignore[assignment]
    return await client.send(call)


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """Reads requests, and answers each connection's with the next of its replies: bytes, or a script that does what
    it wants. Without one left it closes the connection."""

    def __init__(self, *replies: bytes | Script) -> None:
        self.replies = list(replies)
        self.requests: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()
        """A client has disconnected."""
        self.url = ""
        self.tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if (task := asyncio.current_task()) is not None:
            self.tasks.add(task)
        try:
            while await self._request(reader) and self.replies:
                reply = self.replies.pop(0)
                if isinstance(reply, bytes):
                    writer.write(reply)
                    await writer.drain()
                else:
                    await reply(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.gone.set()
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        self.requests.append(head + await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0))
        return True


@asynccontextmanager
async def raw_server(*replies: bytes | Script) -> AsyncIterator[RawServer]:
    server = RawServer(*replies)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks)


def body_of(request: bytes) -> object:
    return json.loads(request.partition(b"\r\n\r\n")[2])
