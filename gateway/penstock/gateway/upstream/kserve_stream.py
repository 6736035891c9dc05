"""One KServe request to a model of another server, from its events to responses."""

from __future__ import annotations

import time
from io import StringIO
from typing import Any

import msgspec

from penstock.classic.messages import InferResponse
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import DeadlineExceededError, OverloadedError, PenstockError
from penstock.gateway.front.context import RequestContext, until
from penstock.gateway.llm.kserve.tensor_form import strings
from penstock.gateway.upstream.answering import next_piece
from penstock.gateway.upstream.asked import Asked
from penstock.gateway.upstream.model import UpstreamModel
from penstock.gateway.upstream.relay import Bounds, note_first_token
from penstock.gateway.upstream.request_body import UpstreamRequest
from penstock.gateway.upstream.stream_reading import StreamReader


class KServeStream:
    """Implements ResponseStream."""

    def __init__(
        self,
        model: UpstreamModel,
        context: RequestContext,
        request: UpstreamRequest,
        statistics: ModelStatistics,
        prefix: str,
        *,
        streams: bool,
    ) -> None:
        """`prefix` stands before the text. `streams`: else everything comes in one response."""
        self.streams = streams
        self._model = model
        self._context = context
        self._request = request
        self._statistics = statistics
        self._prefix = prefix
        self._asked: Asked | None = None
        self._reader: StreamReader | None = None
        self._over = False
        self._ended = False
        self._begun = time.monotonic_ns()
        self._has_responded = False
        statistics.pending += 1

    def __aiter__(self) -> KServeStream:
        return self

    async def __anext__(self) -> InferResponse:
        if self._ended:
            raise StopAsyncIteration
        try:
            async with until(self._context.deadline, DeadlineExceededError("The request's time was over.")):
                text = await self._shown()
        except PenstockError as error:
            self._responded()
            if self._asked is not None:
                self._asked.failed(error)
            self._end(error)
            return InferResponse(None, error=error)
        self._responded()
        shown, self._prefix = self._prefix + text, ""
        response = InferResponse([strings("text_output", [shown])], final=self._over)
        if self._over:
            self._end(None)
        return response

    def ready(self) -> InferResponse | None:
        """Nothing: whatever has come is in one response already."""
        return None

    async def _shown(self) -> str:
        """Of the next response: what has come, or all that comes. Raises PenstockError."""
        piece = await self._text()
        if self.streams and piece:
            return piece
        whole = StringIO()  # pieces may be of very few characters
        whole.write(piece)
        while not self._over and not (self.streams and piece):
            piece = await self._text()
            if self._asked is not None:
                self._asked.reader.keep(len(piece))
            whole.write(piece)
        return whole.getvalue()

    async def _text(self) -> str:
        """What has come since the last time; may be empty. Raises PenstockError."""
        if self._asked is None or self._reader is None:
            self._asked = await self._model.begin(self._context, self._request, "completions", self._model.name)
            self._reader = StreamReader(self._asked.reader, shows_usage=False)
            piece = self._asked.answer.first
        else:
            bounds = Bounds(self._model.settings.idle_timeout, 0)
            piece = await next_piece(self._asked.answer, self._asked.reader, bounds)
        reader = self._reader
        if piece:
            frames = reader.feed(piece)
            if reader.error is not None:
                raise reader.error
        else:
            frames = b""
            reader.end()
        self._over = reader.done or not piece
        if reader.has_text:
            note_first_token(self._context)
        if self._over:
            self._context.record.finish_reasons = reader.finish_reasons
            self._asked.answer.end("200")
        return _text_of(frames)

    def close(self) -> None:
        self._end(None, cancelled=True)

    def _responded(self) -> None:
        if not self._has_responded:
            self._has_responded = True
            if self._statistics.observer is not None:
                self._statistics.observer.first_response(time.monotonic_ns() - self._begun)

    def _end(self, error: PenstockError | None, *, cancelled: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._statistics.pending -= 1
        if self._asked is not None:
            self._asked.end()
        total = time.monotonic_ns() - self._begun
        if error is not None or cancelled:
            reason = "REJECTED" if isinstance(error, OverloadedError) else "BACKEND"
            self._statistics.failed(total, "CANCELED" if cancelled else reason)
            return
        if self._statistics.observer is not None:
            self._statistics.observer.request(total, 0, 0, total, 0)
        self._statistics.executed(1, 0, total, 0)
        self._statistics.succeeded(
            requests=1, inferences=1, total=total, queue=0, compute_input=0, compute_infer=total, compute_output=0
        )


class _Choice(msgspec.Struct):
    text: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


def _text_of(frames: bytes) -> str:
    """Of frames as StreamReader writes them."""
    events = [frame[6:] for frame in frames.split(b"\n\n") if frame.startswith(b"data: ")]
    texts = [choice.text for event in events for choice in _decode(event).choices]
    return "".join(text for text in texts if isinstance(text, str))


_decode = msgspec.json.Decoder(_Event).decode
