"""Work in flight: counted for the drain, and ended early when its client leaves or the drain expires; or detached from
any client.

Everything below learns by cancellation that nobody wants the result any more. gRPC cancels the task of a call whose
client has left. HTTP does not, so there the call watches its client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol

from penstock.engines.errors import CancelledError, NotReadyError, PenstockError
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import RequestRecord

current_request: ContextVar[str] = ContextVar("current_request", default="")
"""Id of the request that the current task works for, for log lines."""

Hook = Callable[[RequestContext], None]


def name_request(record: logging.LogRecord) -> bool:
    """A logging filter that keeps every line, and adds the id of the request that it was written for."""
    request = current_request.get()
    record.request = f" (request {request})" if request else ""
    return True


def be_strict(context: RequestContext) -> None:
    """A hook for requests that begin: what `ignore` would note is refused."""
    context.strict = True


class RequestJournal:
    """Every request that begins ends, once. Lives on the event loop."""

    def __init__(
        self, on_end: Iterable[Hook] = (), on_begin: Iterable[Hook] = (), on_leave: Iterable[Hook] = ()
    ) -> None:
        self._on_end = tuple(on_end)
        self._on_begin = tuple(on_begin)
        self._on_leave = tuple(on_leave)
        self._in_flight: dict[RequestContext, None] = {}

    def begin(self, context: RequestContext) -> None:
        self._in_flight[context] = None
        current_request.set(context.id)
        for tell in self._on_begin:
            tell(context)

    def end(self, context: RequestContext) -> None:
        """Idempotent."""
        if context in self._in_flight:
            del self._in_flight[context]
            context.end()
            for tell in self._on_end:
                tell(context)

    def leave(self, context: RequestContext) -> None:
        """Another process has taken the request over, and reports its end: here only `on_leave` is called."""
        if context in self._in_flight:
            del self._in_flight[context]
            context.end()
            for tell in self._on_leave:
                tell(context)

    def watch(self, on_begin: Hook, on_end: Hook) -> Callable[[], None]:
        """Tells these, too, until what this returns is called."""
        self._on_begin += (on_begin,)
        self._on_end += (on_end,)
        return lambda: self._end_watch(on_begin, on_end)

    def _end_watch(self, on_begin: Hook, on_end: Hook) -> None:
        self._on_begin = tuple(hook for hook in self._on_begin if hook != on_begin)
        self._on_end = tuple(hook for hook in self._on_end if hook != on_end)

    def in_flight(self) -> tuple[RequestContext, ...]:
        """The oldest first."""
        return tuple(self._in_flight)


# Whether the server accepts work, and what is still in flight.
#
# accepting ──leave()──► leaving ──begin()──► draining ──expire()──► expired
#
# From `leave` on, readiness is 503, so that balancers send new work elsewhere, and connections are asked to end;
# requests that still come are served. While draining, new work is refused with 503 and Retry-After, and calls in
# flight continue. At expiry the remaining calls are interrupted: a stream ends with an error event, any other answer
# becomes a 503.


class Interruptible(Protocol):
    def interrupt(self, error: PenstockError) -> None: ...


class DrainState:
    def __init__(self, retry_after: float = 5.0) -> None:
        self.retry_after = retry_after
        """Seconds told to refused clients: about the time until another server takes over."""
        self._leaving = False
        self._draining = False
        self._calls: set[ServedCall] = set()
        self._processes: set[Interruptible] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def leaving(self) -> bool:
        """Not ready any more: it is about to drain, or is draining."""
        return self._leaving

    @property
    def draining(self) -> bool:
        """New work is refused."""
        return self._draining

    @property
    def in_flight(self) -> int:
        """Calls that were admitted and have not ended."""
        return len(self._calls)

    def leave(self) -> None:
        """Tells balancers to send new work elsewhere, and serves what still comes. Idempotent."""
        self._leaving = True

    def begin(self) -> None:
        """Refuses new work from now on. Idempotent; implies `leave`."""
        self._leaving = self._draining = True

    def expire(self) -> None:
        """Ends what is still in flight. Idempotent; implies `begin`."""
        self.begin()
        for call in (*self._calls, *self._processes):
            call.interrupt(self._shutting_down())

    def cancel(self, record: RequestRecord, error: PenstockError) -> bool:
        """Ends the calls of one request with this error. False: it has none."""
        calls = [call for call in self._calls if call.record is record]
        for call in calls:
            call.interrupt(error)
        return bool(calls)

    def admit(self, call: ServedCall) -> None:
        """Counts a call in. Raises NotReadyError while draining."""
        if self._draining:
            raise self._shutting_down()
        self._calls.add(call)
        self._idle.clear()

    def release(self, call: ServedCall) -> None:
        self._calls.discard(call)
        self._look()

    def wait_for(self, process: Interruptible) -> None:
        """Another process of the server drains, too: this one counts as busy until `wait_no_more`."""
        self._processes.add(process)
        self._idle.clear()

    def wait_no_more(self, process: Interruptible) -> None:
        """Idempotent."""
        self._processes.discard(process)
        self._look()

    def _look(self) -> None:
        if not self._calls and not self._processes:
            self._idle.set()

    async def wait_idle(self, seconds: float | None = None) -> bool:
        """True once nothing is in flight, False when that many seconds passed before."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _shutting_down(self) -> NotReadyError:
        return NotReadyError("The server is shutting down.", retry_after=self.retry_after)


WatchClient = Callable[[Callable[[], None]], Callable[[], object]]
"""Takes what to call once the client has left. Returns a function that ends the watch."""


class ClientGone(Exception):
    """The client left before its request was complete: there is nobody to answer."""


class ServedCall:
    """`with Call(drain, context, watch_client) as call:`, then `call.watch()` as soon as the body is read.

    Raises NotReadyError on entry while draining. If the client leaves, the block is cancelled, and nothing is raised;
    if it is interrupted, as when the drain expires, it is cancelled and raises that error.
    """

    __slots__ = ("_drain", "_reason", "_stop_watching", "_task", "_watch_client", "record")

    def __init__(self, drain: DrainState, context: RequestContext, watch_client: WatchClient | None = None) -> None:
        self._drain = drain
        self.record = context.record
        self._watch_client = watch_client
        self._stop_watching: Callable[[], object] | None = None
        self._reason: Exception | None = None

    def __enter__(self) -> ServedCall:
        self._drain.admit(self)
        self._task = asyncio.current_task()
        return self

    def watch(self) -> None:
        """From now on the call is cancelled when the client leaves."""
        if self._watch_client is not None:
            self._stop_watching = self._watch_client(self._client_left)

    def _client_left(self) -> None:
        self._cancel(ClientGone())

    def interrupt(self, error: PenstockError) -> None:
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
            self.record.cancelled()
        if self._reason is None or self._task is None:
            return isinstance(error, ClientGone)
        self._task.uncancel()
        if isinstance(self._reason, PenstockError) and isinstance(error, asyncio.CancelledError):
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
