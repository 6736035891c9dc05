"""A chat with another server, from its events to the parts that other APIs are made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from penstock.engines.errors import PenstockError
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.upstream.answer_reading import StreamReader
from penstock.gateway.models.upstream.attempts import CountedAnswer
from penstock.gateway.models.upstream.failures import broken_answer
from penstock.gateway.models.upstream.relay import SilenceBounds, note_first_token, silent
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.http_connection import BrokenAnswer
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart

_MAX_CALLS = 1024


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM's: what has stopped it."""


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class ChatAnswer:
    """Implements UpstreamAnswer. To be closed."""

    def __init__(
        self, counted: CountedAnswer, context: RequestContext, bounds: SilenceBounds, *, show_reasoning: bool
    ) -> None:
        self.usage = counted.reader.usage
        self._counted = counted
        self._context = context
        self._bounds = bounds
        self._show_reasoning = show_reasoning
        self._reader = StreamReader(counted.reader, shows_usage=False)
        self._first = counted.answer.first
        self._ready: list[ChoiceDelta] | None = None
        self._calls: set[int] = set()
        """That have begun."""
        self._finish: str | None = None
        self._stopped_by: str | int | None = None
        self._over = False

    async def begin(self) -> ChatAnswer:
        """Waits for the first delta or pulse. Raises PenstockError."""
        self._ready = await self.__anext__()
        return self

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        if self._over:
            raise StopAsyncIteration
        try:
            return await self._next()
        except PenstockError as error:
            self._over = True
            self._counted.failed(error)
            raise

    def close(self) -> None:
        """Idempotent. What has not come is given up."""
        self._over = True
        self._counted.end()

    async def _next(self) -> list[ChoiceDelta]:
        """Raises PenstockError."""
        while True:
            if self._reader.error is not None:
                raise self._reader.error
            piece = await self._piece()
            if piece is None:
                return []
            parts = self._parts(piece)
            if self._reader.has_text:
                note_first_token(self._context)
            if self._over:
                self._context.record.finish_reasons = self._reader.finish_reasons
                self._counted.answer.end("200")
                return [_delta(parts, "length" if self._finish == "length" else "stop", self._stopped_by)]
            if parts:
                return [_delta(parts)]

    async def _piece(self) -> bytes | None:
        """Empty at the end, None after a pulse without one. Raises UpstreamError."""
        if self._first:
            first, self._first = self._first, b""
            return first
        idle, pulse = self._bounds
        connection, loop = self._counted.answer.connection, asyncio.get_running_loop()
        left = idle - (loop.time() - connection.arrived)
        try:
            async with asyncio.timeout(min(left, pulse) if pulse else left):
                return await connection.chunk()
        except TimeoutError:
            if loop.time() - connection.arrived >= idle:
                raise silent(self._counted.reader.model, idle) from None
            return None
        except BrokenAnswer as reason:
            if self._reader.complete:
                return b""
            raise broken_answer(self._counted.reader.model, str(reason)) from None

    def _parts(self, piece: bytes) -> list[Part]:
        """Raises UpstreamError."""
        if piece:
            frames = self._reader.feed(piece)
            self._over = self._reader.done
        else:
            frames = b""
            self._reader.end()
            self._over = True
        parts: list[Part] = []
        for frame in frames.split(b"\n\n"):
            if frame.startswith(b"data: "):
                self._add(frame[6:], parts)
        return parts

    def _add(self, event: bytes, parts: list[Part]) -> None:
        try:
            choices = _decode(event).choices or ()
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise broken_answer(self._counted.reader.model, "its choices cannot be read") from None
        for choice in choices:
            if choice.index:
                continue
            if choice.delta is not None:
                parts += self._of(choice.delta)
            if choice.finish_reason is not None:
                self._finish, self._stopped_by = choice.finish_reason, choice.stop_reason

    def _of(self, delta: _Delta) -> list[Part]:
        parts: list[Part] = []
        thought = delta.reasoning_content or delta.reasoning
        if thought and self._show_reasoning:
            parts.append(ReasoningPart(thought))
        parts += [TextPart(text) for text in (delta.content, delta.refusal) if text]
        parts += [self._call(call) for call in delta.tool_calls or ()]
        return parts

    def _call(self, call: _Call) -> ToolCallPart:
        """Some servers repeat a call's name and id with each of its pieces."""
        if not 0 <= call.index < _MAX_CALLS:
            raise broken_answer(self._counted.reader.model, "its tool calls cannot be read")
        function = call.function or _Function()
        if call.index in self._calls:
            return ToolCallPart(call.index, function.arguments or "")
        self._calls.add(call.index)
        return ToolCallPart(call.index, function.arguments or "", function.name or "", call.id or None)


def _delta(parts: list[Part], finish: str | None = None, stopped_by: str | int | None = None) -> ChoiceDelta:
    text = "".join([part.text for part in parts if isinstance(part, TextPart)])
    return ChoiceDelta(0, text, [], finish, stopped_by, parts=parts)
