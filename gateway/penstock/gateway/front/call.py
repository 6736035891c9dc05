"""A unit of work in flight: counted for the drain, and ended early when its client leaves or the drain expires.

Cancellation is how everything below learns that nobody wants the result any more. gRPC cancels the task of a call whose
client has left. uvicorn does not: there the transport gives a coroutine that ends when the client has left, and a
watcher waits for it beside the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from penstock.engines.errors import NotReadyError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.drain import DrainState


class ClientGone(Exception):
    """The client left before its request was complete; nobody is there to answer."""


class Call:
    """`with Call(drain, context, disconnected) as call:`, then `call.watch()` as soon as the body is read.

    Raises NotReadyError on entry while draining. When the client has left, the block is cancelled and left silently;
    when the drain expires, it is cancelled and NotReadyError comes out of it.
    """

    __slots__ = ("_disconnected", "_drain", "_reason", "_record", "_task", "_watcher")

    def __init__(
        self, drain: DrainState, context: RequestContext, disconnected: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._drain = drain
        self._record = context.record
        self._disconnected = disconnected
        self._watcher: asyncio.Task[None] | None = None
        self._reason: Exception | None = None

    def __enter__(self) -> Call:
        self._drain.admit(self)
        self._task = asyncio.current_task()
        return self

    def watch(self) -> None:
        """From now on the transport's `disconnected` belongs to the watcher."""
        if self._disconnected is not None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(self._disconnected))

    async def _watch(self, disconnected: Callable[[], Awaitable[None]]) -> None:
        await disconnected()
        self._cancel(ClientGone())

    def interrupt(self, error: NotReadyError) -> None:
        """Ends the call with this error at its next suspension."""
        self._cancel(error)

    def _cancel(self, reason: Exception) -> None:
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._drain.release(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if isinstance(self._reason or error, ClientGone):
            self._record.cancelled()
        if self._reason is None or self._task is None:
            return isinstance(error, ClientGone)
        self._task.uncancel()
        if isinstance(self._reason, NotReadyError) and isinstance(error, asyncio.CancelledError):
            raise self._reason from None
        return isinstance(error, asyncio.CancelledError)
