"""Work in flight: counted for the drain, and ended early when its client leaves or the drain expires; or detached from
any client.

Everything below learns by cancellation that nobody wants the result any more. gRPC cancels the task of a call whose
client has left. HTTP does not, so there the call watches its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from penstock.engines.errors import CancelledError, NotReadyError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.journal import RequestJournal

WatchClient = Callable[[Callable[[], None]], Callable[[], object]]
"""Takes what to call once the client has left. Returns a function that ends the watch."""


class ClientGone(Exception):
    """The client left before its request was complete: there is nobody to answer."""


class Call:
    """`with Call(drain, context, watch_client) as call:`, then `call.watch()` as soon as the body is read.

    Raises NotReadyError on entry while draining. If the client leaves, the block is cancelled, and nothing is raised;
    if the drain expires, it is cancelled and raises NotReadyError.
    """

    __slots__ = ("_drain", "_reason", "_record", "_stop_watching", "_task", "_watch_client")

    def __init__(self, drain: DrainState, context: RequestContext, watch_client: WatchClient | None = None) -> None:
        self._drain = drain
        self._record = context.record
        self._watch_client = watch_client
        self._stop_watching: Callable[[], object] | None = None
        self._reason: Exception | None = None

    def __enter__(self) -> Call:
        self._drain.admit(self)
        self._task = asyncio.current_task()
        return self

    def watch(self) -> None:
        """From now on the call is cancelled when the client leaves."""
        if self._watch_client is not None:
            self._stop_watching = self._watch_client(self._client_left)

    def _client_left(self) -> None:
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
        if self._stop_watching is not None:
            self._stop_watching()
        if isinstance(self._reason or error, ClientGone):
            self._record.cancelled()
        if self._reason is None or self._task is None:
            return isinstance(error, ClientGone)
        self._task.uncancel()
        if isinstance(self._reason, NotReadyError) and isinstance(error, asyncio.CancelledError):
            raise self._reason from None
        return isinstance(error, asyncio.CancelledError)


class Detached:
    """A request whose client has left, or never was: a response in the background, a stream that goes on, a line of a
    batch. It is in the journal as all others are."""

    def __init__(
        self,
        context: RequestContext,
        journal: RequestJournal,
        work: Callable[[], Awaitable[None]],
        sink: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        """`context` is its own, not that of the request that it goes on for, which ends before. `sink` is told the end
        of its task: None, the error, or asyncio.CancelledError, also where the work has never begun."""
        self.context = context
        self._journal = journal
        self._work = work
        self._sink = sink
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The work is done in a task of its own."""
        self._task = asyncio.create_task(self.run())
        self._task.add_done_callback(self._ended)

    async def run(self) -> None:
        """The work, in the caller's task. Raises what it does, which the record has by then."""
        self._journal.begin(self.context)
        try:
            await self._work()
        except asyncio.CancelledError:
            self.context.record.failed(CancelledError("Nobody waits for the answer any more."))
            raise
        except Exception as error:
            self.context.record.failed(error)
            raise
        finally:
            self._journal.end(self.context)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.context.end()  # for a task that was cancelled before it ran
        self._sink(asyncio.CancelledError() if task.cancelled() else task.exception())

    @property
    def cancelled(self) -> bool:
        return self._task is not None and self._task.cancelled()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def wait(self) -> None:
        """Returns when it has ended, however it does."""
        if self._task is not None:
            await asyncio.wait((self._task,))
