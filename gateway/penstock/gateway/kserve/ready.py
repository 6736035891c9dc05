"""Takes together what a stream has ready, so that it can leave in one write."""

from __future__ import annotations

import types
from collections.abc import Generator
from typing import Any

from penstock.engines.classic.base import ResponseStream
from penstock.engines.classic.messages import InferResponse

MAX_TOGETHER = 64


class ReadyResponses:
    """An async iterator over lists of responses: waits for one, and takes with it what needs no waiting for.

    To find out, it steps the stream's next coroutine once by hand. If that one suspends, it is put aside and waited for
    in the next call, so that nothing is asked of the stream twice and no task is needed for every response.
    """

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream
        self._begun: Generator[Any, Any, InferResponse] | None = None
        self._waits_for: Any = None
        self._end: Exception | None = None
        """What comes after the responses that have been given."""

    def __aiter__(self) -> ReadyResponses:
        return self

    async def __anext__(self) -> list[InferResponse]:
        found = [await self._next()]
        while len(found) < MAX_TOGETHER and not found[-1].final:
            try:
                response = self._step()
            except Exception as end:
                self._end = end
                break
            if response is None:
                break
            found.append(response)
        return found

    async def _next(self) -> InferResponse:
        if self._end is not None:
            raise self._end
        if self._begun is None:
            return await self._stream.__anext__()
        begun, self._begun = self._begun, None
        return await _resumed(begun, self._waits_for)

    def _step(self) -> InferResponse | None:
        """The next response if it is there."""
        begun: Any = self._stream.__anext__().__await__()
        try:
            self._waits_for = begun.send(None)
        except StopIteration as done:
            response: InferResponse = done.value
            return response
        self._begun = begun
        return None

    def close(self) -> None:
        """Nobody wants the rest."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()
        self._end = StopAsyncIteration()
        self._stream.close()


@types.coroutine
def _resumed(begun: Generator[Any, Any, InferResponse], waits_for: Any) -> Generator[Any, Any, InferResponse]:
    """Goes on with an await that was put aside while it waited for this future."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:
                waits_for = begun.throw(error)
            else:
                waits_for = begun.send(sent)
    except StopIteration as done:
        response: InferResponse = done.value
        return response
