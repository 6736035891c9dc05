"""The supervisor's side of requests that fronts pass on: a Unix socket in a folder of this user alone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from starlette.types import ASGIApp, Message

from penstock.engines.errors import PenstockError
from penstock.gateway.apis.kserve.grpc.rpc import status
from penstock.gateway.processes.fronts.passing import BODY, AnswerStart, CallEnd, Passage, PassedCall, PassedRequest
from penstock.gateway.transports.http.exchange import ARRIVAL_KEY

logger = logging.getLogger("penstock")

_BACKLOG = 2048
_LIMIT = 256 << 10
_UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]


class CallDetails(NamedTuple):
    """As `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: list[tuple[str, str | bytes]]


class PrivatePort:
    def __init__(self, app: ASGIApp, find_handler: Callable[[Any], grpc.RpcMethodHandler | None]) -> None:
        self._app = app
        self._find_handler = find_handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, path: Path) -> None:
        """Raises OSError."""
        self._server = await asyncio.start_unix_server(self._accept, str(path), limit=_LIMIT, backlog=_BACKLOG)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        passage = Passage(reader, writer)
        try:
            _, asked = await passage.receive()
            if isinstance(asked, PassedRequest):
                await _answer(self._app, asked, passage)
            elif isinstance(asked, PassedCall):
                await _Rpc(asked, passage).run(self._find_handler)
            await passage.until_closed()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the front's client has left, the front is gone, or the server ends
        except Exception:
            logger.exception("a request from a front failed")
        finally:
            passage.close()


async def _answer(app: ASGIApp, asked: PassedRequest, passage: Passage) -> None:
    async def receive() -> Message:
        try:
            kind, data = await passage.receive()
        except ConnectionError:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": data if kind == BODY else b"", "more_body": kind == BODY}

    async def send(message: Message) -> None:
        with suppress(ConnectionError):  # the task that watches learns of it by `receive`
            if message["type"] == "http.response.start":
                passage.say(AnswerStart(status=message["status"], headers=list(message["headers"])))
                return
            await passage.send(message.get("body", b""))
            if not message.get("more_body", False):
                passage.end()
                await passage.flush()

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": asked.method,
        "path": asked.path,
        "raw_path": asked.raw_path,
        "query_string": asked.query,
        "root_path": "",
        "headers": asked.headers,
        "http_version": asked.http_version,
        "scheme": asked.scheme,
        "client": asked.client,
        "server": asked.server,
        ARRIVAL_KEY: asked.arrival,
    }
    await app(scope, receive, send)


class _Ended(Exception):
    """The handler has ended its RPC with a status."""


class _Rpc:
    """What a handler sees of an RPC (`kserve.grpc.rpc.Rpc`)."""

    def __init__(self, called: PassedCall, passage: Passage) -> None:
        self._called = called
        self._passage = passage
        self._until = None if called.seconds is None else time.monotonic() + called.seconds
        self._trailing: list[tuple[str, str | bytes]] = []
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    async def run(self, find_handler: Callable[[Any], grpc.RpcMethodHandler | None]) -> None:
        """The handler is cancelled when the connection ends: the front closes it when the caller has left, and when the
        caller's time is over."""
        handler = find_handler(CallDetails(self._called.path, self._called.metadata))
        if handler is None:
            await self._finish(_UNIMPLEMENTED, "Method not found!")
            return
        serving = asyncio.create_task(self._serve(handler))
        reading = asyncio.create_task(self._read_messages())
        try:
            await asyncio.wait((serving, reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            reading.cancel()
            await asyncio.gather(serving, reading, return_exceptions=True)

    async def _read_messages(self) -> None:
        """Returns when the connection has ended."""
        with suppress(ConnectionError):
            while True:
                kind, data = await self._passage.receive()
                await self._messages.put(data if kind == BODY else None)

    async def _serve(self, handler: grpc.RpcMethodHandler) -> None:
        try:
            if handler.request_streaming:
                await handler.stream_stream(None, self)
            elif handler.response_streaming:
                await handler.unary_stream(await self._only(), self)
            else:
                await self.write(await handler.unary_unary(await self._only(), self))
        except _Ended:
            return
        except Exception as error:
            if not isinstance(error, PenstockError):
                logger.exception("an RPC failed")
            code, details = status(error)
            await self._finish(code.value[0], details)
            return
        await self._finish(0, "")

    async def _only(self) -> bytes:
        data = await self._messages.get()
        return b"" if data is None else data

    async def _finish(self, code: int, details: str) -> None:
        """Raises CancelledError where the caller has left."""
        try:
            self._passage.say(CallEnd(code=code, details=details, metadata=self._trailing))
            await self._passage.flush()
        except ConnectionError:
            raise asyncio.CancelledError from None

    # What the handler asks for

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._called.metadata

    def time_remaining(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = list(metadata)

    async def read(self) -> Any:
        data = await self._messages.get()
        if data is None:
            self._messages.put_nowait(None)
            return grpc.aio.EOF
        return data

    async def write(self, data: bytes) -> None:
        """Raises CancelledError where the caller has left."""
        try:
            await self._passage.send_message(data)
        except ConnectionError:
            raise asyncio.CancelledError from None

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        await self._finish(code.value[0], details)
        raise _Ended
