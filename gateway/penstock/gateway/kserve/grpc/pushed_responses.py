"""Responses that go from the model to the socket without resuming a task for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.classic.base import PushedStream
from penstock.classic.messages import InferResponse


class PushedResponses:
    """An asynchronous iterator over the responses of one request that need their task: the first, the last, errors,
    and whatever `write` does not take. All others go to `write`."""

    def __init__(self, responses: PushedStream, write: Callable[[InferResponse], bool]) -> None:
        """`write` returns False for a response that it has not written."""
        self._responses = responses
        self._write = write
        self._begun = False
        self._next: asyncio.Future[InferResponse]

    def __aiter__(self) -> PushedResponses:
        return self

    async def __anext__(self) -> InferResponse:
        if not self._begun:
            self._begun = True
            return await self._responses.__anext__()
        self._next = asyncio.get_running_loop().create_future()
        try:
            self._responses.listen(self._take)
            return await self._next
        finally:
            self._responses.listen(None)

    def _take(self, response: InferResponse) -> None:
        if self._next.done():  # the task is being cancelled
            return
        try:
            if not response.final and response.error is None and self._write(response):
                return
        except Exception as error:
            self._next.set_exception(error)
        else:
            self._next.set_result(response)
        self._responses.listen(None)
