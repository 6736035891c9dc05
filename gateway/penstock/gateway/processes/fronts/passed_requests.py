"""The supervisor's side of requests that fronts pass on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from starlette.types import ASGIApp, Message

from penstock.engines.errors import PenstockError
from penstock.gateway.apis.kserve.grpc.rpc import status
from penstock.gateway.processes.fronts.passing import (
    AnswerEnd,
    AnswerStart,
    CallEnd,
    FromPassing,
    Passage,
    PassedCall,
    PassedRequest,
    Tell,
)
from penstock.gateway.transports.grpc.server import CallDetails, FindHandler
from penstock.gateway.transports.http.exchange import ARRIVAL_KEY

logger = logging.getLogger("penstock")

_UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]


class PassedRequests:
    """Those of one front. Lives on the event loop of the supervisor."""

    def __init__(
        self,
        app: ASGIApp,
        find_handler: FindHandler,
        tell: Tell,
    ) -> None:
        self._app = app
        self._find_handler = find_handler
        self._tell = tell
        self._passages: dict[int, Passage] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, message: FromPassing, tail: memoryview) -> None:
        number = message.number
        passage = self._passages.get(number)
        if isinstance(message, PassedRequest | PassedCall):
            passage = self._passages[number] = Passage(number, self._tell, partial(self._passages.pop, number, None))
            if isinstance(message, PassedRequest):
                self._begin(passage, _answer(self._app, message, passage))
            else:
                passage.on_lost = self._begin(passage, _Rpc(message, passage).run(self._find_handler)).cancel
        elif passage is not None:
            passage.heard(message, tail)

    def _begin(self, passage: Passage, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, passage))
        return task

    def _ended(self, passage: Passage, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        passage.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request from a front failed", exc_info=error)

    def lost(self) -> None:
        """The front has gone."""
        for passage in list(self._passages.values()):
            passage.lost()

    async def stop(self) -> None:
        """Returns when none is under way any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _answer(app: ASGIApp, request: PassedRequest, passage: Passage) -> None:
    async def receive() -> Message:
        try:
            message = await passage.receive()
        except ConnectionError:
            return {"type": "http.disconnect"}
        if isinstance(message, bytes):
            return {"type": "http.request", "body": message, "more_body": True}
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            passage.say(AnswerStart(passage.number, message["status"], list(message["headers"])))
            return
        with suppress(ConnectionError):  # the task that watches learns of it by `receive`
            await passage.send(message.get("body", b""))
        if not message.get("more_body", False):
            passage.say(AnswerEnd(passage.number))

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": request.method,
        "path": request.path,
        "raw_path": request.raw_path,
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "http_version": request.http_version,
        "scheme": request.scheme,
        "client": request.client,
        "server": request.server,
        ARRIVAL_KEY: request.arrival,
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
        self._has_all = False

    async def run(self, find_handler: FindHandler) -> None:
        """To be cancelled when the front gives it up: the caller has left, or the caller's time is over."""
        handler = find_handler(CallDetails(self._called.path, tuple(self._called.metadata)))
        if handler is None:
            self._finish(_UNIMPLEMENTED, "Method not found!")
        else:
            await self._serve(handler)

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
            self._finish(code.value[0], details)
            return
        self._finish(0, "")

    async def _only(self) -> bytes:
        data = await self.read()
        return b"" if data is grpc.aio.EOF else bytes(data)

    def _finish(self, code: int, details: str) -> None:
        self._passage.say(CallEnd(self._passage.number, code, details, self._trailing))

    # What the handler asks for

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._called.metadata

    def time_remaining(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = list(metadata)

    async def read(self) -> Any:
        """Raises CancelledError where the caller has left."""
        if not self._has_all:
            try:
                message = await self._passage.receive()
            except ConnectionError:
                raise asyncio.CancelledError from None
            if isinstance(message, bytes):
                return message
            self._has_all = True
        return grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        """Raises CancelledError where the caller has left."""
        try:
            await self._passage.send_message(data)
        except ConnectionError:
            raise asyncio.CancelledError from None

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self._finish(code.value[0], details)
        raise _Ended
