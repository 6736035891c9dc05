"""The responses of a request to an ensemble, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from penstock.classic.messages import InferResponse

_UNREAD = 16
"""Responses that wait for their reader. Then the steps wait, too."""

Give = Callable[[InferResponse], Awaitable[None]]
"""Takes a response; waits while too many are unread."""


class EnsembleStream:
    """Implements ResponseStream over a task that runs the request."""

    def __init__(self, produce: Callable[[Give], Coroutine[None, None, None]], ended: Callable[[], None]) -> None:
        """`produce` gives all responses, the last one `final`. `ended` is called once, when it is over."""
        self._unread: asyncio.Queue[InferResponse] = asyncio.Queue(_UNREAD)
        self._closed = False
        self._task = asyncio.create_task(produce(self._unread.put))
        self._ended = ended
        self._task.add_done_callback(self._over)

    def __aiter__(self) -> EnsembleStream:
        return self

    async def __anext__(self) -> InferResponse:
        if self._closed:
            raise StopAsyncIteration
        response = await self._unread.get()
        if self._closed:
            raise StopAsyncIteration
        return self._given(response)

    def ready(self) -> InferResponse | None:
        return None if self._closed or self._unread.empty() else self._given(self._unread.get_nowait())

    def _given(self, response: InferResponse) -> InferResponse:
        self._closed = response.final
        return response

    def _over(self, task: asyncio.Task[None]) -> None:
        self._ended()
        if self._closed and self._unread.empty():
            self._unread.put_nowait(InferResponse(None))  # wakes the reader of a stream that another task has closed

    def close(self) -> None:
        if not self._closed:  # behind the final response, the task ends by itself
            self._closed = True
            self._task.cancel()
