"""Bounds on what all connections hold: bodies that come, answers that wait, and requests while the loop lags."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from penstock.engines.errors import OverloadedError
from penstock.gateway.requests.heap import trim_heap

logger = logging.getLogger("penstock.connections")

T = TypeVar("T")


class WorkPool:
    """Work of one kind does not wait behind another's: a template that takes seconds delays no tensor."""

    def __init__(self, kind: str, max_cost: int) -> None:
        """`kind` as errors name it; `max_cost` bounds what waits and runs together, in whatever `run` is told costs."""
        self.kind = kind
        self.max_cost = max_cost
        self.cost = 0
        self.refused = 0
        self._threads = ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix=f"penstock-{kind}")

    async def run(self, cost: int, function: Callable[..., T], *args: object) -> T:
        """What costs more than everything allowed runs alone. Cancelling gives up what has not begun.

        Raises OverloadedError at once where too much is waiting.
        """
        if self.cost and self.cost + cost > self.max_cost:
            self.refused += 1
            raise OverloadedError(f"Too much {self.kind} waits to be worked on.", retry_after=1)
        call = partial(contextvars.copy_context().run, function, *args)
        self.cost += cost
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self.cost -= cost


TEXT_COST = 64 << 20
"""Characters of messages and prompts."""
TENSOR_COST = 1 << 30
"""Bytes of bodies and tensors."""


class WorkPools:
    """Of a server."""

    def __init__(self, text_cost: int = TEXT_COST, tensor_cost: int = TENSOR_COST) -> None:
        self.text = WorkPool("text", text_cost)
        """Chat templates and long prompts."""
        self.tensors = WorkPool("tensor data", tensor_cost)
        """Decoding, encoding and compressing of large requests and answers."""


SMALL_BODY = 64 << 10
"""Bodies up to this are not counted where the number of connections bounds them."""
_FOR_SMALL = 64 << 20
"""Beyond the limit, for small bodies where these are counted: large ones must not keep them out."""
_LARGE_BUFFERS = 16 << 20
_TRIM_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_FADE = 0.8
_LEFT = 7 / 8
"""Of the limit, after connections have been closed for its sake."""
_MUCH, _LITTLE = 16 << 20, 1 << 20
_STEP = 128 << 10
_SPARE = 2 * _STEP


class BodyBudget:
    """Bytes of request bodies in memory, from their arrival to the end of their requests. Safe to use from threads."""

    def __init__(self, limit: int, idle: Callable[[], None] | None = None) -> None:
        """`idle` is called when nothing is held any more and much was: on the event loop."""
        self.limit = limit
        self.held = 0
        self.refused = 0
        """Requests that there was no room for."""
        self._most = 0
        self._idle = idle
        self._lock = threading.Lock()

    def check(self, size: int) -> None:
        """Raises OverloadedError where a body that is announced with this size has no room now."""
        if size > SMALL_BODY and self.held + size > self.limit:
            raise self._full()

    def take(self, size: int, *, small: bool = False) -> None:
        """`small`: there may be more of these than the limit says. Raises OverloadedError."""
        limit = self.limit + (_FOR_SMALL if small else 0)
        with self._lock:
            if self.held + size > limit:
                raise self._full()
            self.held += size
            self._most = max(self._most, self.held)

    def give_back(self, size: int) -> None:
        with self._lock:
            self.held -= size
            quiet = self.held < SMALL_BODY and self._most >= _LARGE_BUFFERS
            if quiet:
                self._most = 0
        if quiet and self._idle is not None:
            self._idle()

    def _full(self) -> OverloadedError:
        self.refused += 1
        return OverloadedError(
            f"The server holds {self.held} bytes of request bodies, and this one has no room beside them.",
            retry_after=1,
        )


class BodyReader(Protocol):
    """A connection."""

    @property
    def seconds_to_read(self) -> float:
        """That its client would need for what has waited longest, as fast as it has read lately. About one second
        without news; what has just been queued does not count."""

    def abort(self) -> None: ...


class UnreadAnswers:
    """Bytes of all connections. Each connection may have much, since answers are large; together they may not. When
    they have too much, the connections are closed whose clients would take longest to read theirs: those that do not
    read, or just enough to look alive."""

    def __init__(self, limit: int, idle: Callable[[], None] | None = None) -> None:
        """`idle` is called when little is held any more and much was."""
        self.limit = limit
        self._idle = idle
        self._most = 0
        self.held = 0
        self.closed = 0
        """Connections, so far."""
        self._by_reader: dict[BodyReader, int] = {}

    def note(self, reader: BodyReader, size: int) -> None:
        """So much waits for it now. To be told 0 when it has ended."""
        before = self._by_reader.get(reader, 0)
        if size:
            self._by_reader[reader] = size
        elif before:
            del self._by_reader[reader]
        self.held += size - before
        if size > before:
            self._most = max(self._most, self.held)
            if self.held > self.limit:
                self._make_room()
        elif self._most > _MUCH and self.held < _LITTLE:
            self._most = 0
            if self._idle is not None:
                self._idle()

    def _make_room(self) -> None:
        slowest = sorted(self._by_reader, key=lambda reader: (reader.seconds_to_read, self._by_reader[reader]))
        closed, held = 0, self.held
        while slowest and self.held > self.limit * _LEFT:
            reader = slowest.pop()
            self.note(reader, 0)
            reader.abort()
            closed += 1
        self.closed += closed
        logger.warning("%d bytes of answers waited for their clients; closed %d connections", held, closed)


class ConnectionShare:
    """For connections with many requests at a time. The first 64 KiB are free, as they are for a connection that has
    one request. What is above them is taken from the sum in steps, so that small requests do not touch it each time."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0
        self._covered = SMALL_BODY
        """Free, or taken from the sum."""

    def take(self, size: int) -> None:
        """Raises OverloadedError, and then takes nothing."""
        held = self._held + size
        if held > self._covered:
            more = -(-(held - self._covered) // _STEP) * _STEP
            self._budget.take(more)
            self._covered += more
        self._held = held

    def give_back(self, size: int) -> None:
        self._held -= size
        if self._covered > SMALL_BODY and (not self._held or self._covered - self._held > _SPARE):
            spare = (self._covered - max(self._held, SMALL_BODY)) // _STEP * _STEP
            self._covered -= spare
            self._budget.give_back(spare)


class LoopLag:
    """How late the event loop runs what is due. While it is late, requests are refused that would make it later; one
    look alone says nothing, since the whole process may have stood still."""

    def __init__(self, limit: float) -> None:
        """`limit` in seconds; 0: nothing is refused."""
        self.limit = limit
        self.recent = 0.0
        """Seconds; the latest large value counts less and less, to a tenth within a second."""
        self.refused = 0
        self._last = self._before = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._measure())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _LOOK_SECONDS
        while True:
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self.note(now - due)
            due = now + _LOOK_SECONDS

    def note(self, late: float) -> None:
        self.recent = max(late, self.recent * _FADE)
        self._before, self._last = self._last, late

    def check(self) -> None:
        """Raises OverloadedError."""
        if self.limit and min(self._before, self._last) > self.limit:
            self.refused += 1
            raise OverloadedError("The server is too busy to take requests in.", retry_after=1)


class BodyIntake:
    def __init__(self, body_bytes: int = 1 << 30, loop_lag: float = 0.0) -> None:
        self.bodies = BodyBudget(body_bytes, self._trim_soon)
        self.unread = UnreadAnswers(body_bytes, self._trim_soon)
        """Answers may take as much again."""
        self.lag = LoopLag(loop_lag)
        self._trim: asyncio.TimerHandle | None = None

    def _trim_soon(self) -> None:
        """When large bodies or answers have come and gone, their memory goes back to the system."""
        with suppress(RuntimeError):  # a thread has no loop, nor have tests
            if self._trim is None:
                self._trim = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim_now)

    def _trim_now(self) -> None:
        self._trim = None
        if self.bodies.held + self.unread.held < _LARGE_BUFFERS:
            asyncio.get_running_loop().run_in_executor(None, trim_heap)
