"""The responses of a request to a model in another process, as they come."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable

from penstock.classic.base import AdmittedLater
from penstock.classic.messages import InferRequest, InferResponse
from penstock.engines.errors import PenstockError
from penstock.gateway.model_host.window import ReadWindow


class RemoteStream(AdmittedLater):
    """A `ResponseStream` with one reader. What lies unread in it is bounded: the host waits for `report`."""

    def __init__(
        self,
        request: InferRequest,
        loop: AbstractEventLoop,
        number: int,
        report: Callable[[int, int, int], None],
        cancel: Callable[[int], None],
    ) -> None:
        """`report` tells the host that so many responses and bytes have been read."""
        self.request = request
        self._loop = loop
        self._number = number
        self._report = report
        self._cancel = cancel
        self._window = ReadWindow()
        self._unread: deque[tuple[InferResponse, int]] = deque()
        self._reader: Future[None] | None = None
        self._ended = False
        self._refusal: PenstockError | None = None

    def put(self, response: InferResponse, size: int, refused: bool = False) -> None:
        """`size`: bytes of its tensors. `refused`: its error is why the request was never begun."""
        if self._ended:
            return
        self._refusal = response.error if refused else None
        self._ended = response.final
        self._unread.append((response, size))
        self._wake()

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> InferResponse:
        await self._something()
        if not self._unread:
            raise StopAsyncIteration
        return self._pop()

    async def admitted(self) -> None:
        await self._something()
        if self._refusal is not None:
            raise self._refusal

    async def _something(self) -> None:
        """Returns when there is a response, or will be none."""
        while not self._unread and not self._ended:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def ready(self) -> InferResponse | None:
        return self._pop() if self._unread else None

    def _pop(self) -> InferResponse:
        response, size = self._unread.popleft()
        if not self._ended:
            report = self._window.take(size)
            if report is not None:
                self._report(self._number, *report)
        return response

    def close(self) -> None:
        self._unread.clear()
        if not self._ended:
            self._ended = True
            self._cancel(self._number)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
