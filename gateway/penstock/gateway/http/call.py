"""A unit of work in flight: counted for the drain, and ended early when its client leaves or the drain expires.

uvicorn does not cancel a handler whose client went away, so a watcher waits for `http.disconnect` beside it and cancels
it; cancellation is how everything below learns that nobody wants the result any more.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from penstock.engines.errors import NotReadyError
from penstock.gateway.http.exchange import ClientGone, Exchange


class Call:
    """`async with Call(exchange) as call:`, then `call.watch()` as soon as the body is read.

    Raises NotReadyError on entry while draining. When the client has left, the block is cancelled and left silently;
    when the drain expires, it is cancelled and NotReadyError comes out of it.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._watcher: asyncio.Task[None] | None = None
        self._reason: Exception | None = None

    async def __aenter__(self) -> Call:
        self._exchange.drain.admit(self)
        self._task = asyncio.current_task()
        return self

    def watch(self) -> None:
        """From now on the ASGI `receive` belongs to the watcher."""
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self._cancel(ClientGone())

    def interrupt(self, error: NotReadyError) -> None:
        """Ends the call with this error at its next suspension."""
        self._cancel(error)

    def _cancel(self, reason: Exception) -> None:
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._exchange.drain.release(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._reason is None or self._task is None:
            return isinstance(error, ClientGone)
        self._task.uncancel()
        if isinstance(self._reason, NotReadyError) and isinstance(error, asyncio.CancelledError):
            raise self._reason from None
        return isinstance(error, asyncio.CancelledError)
