"""What the server takes in before a scheduler sees it: bytes of bodies, and requests while the event loop keeps up."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from penstock.engines.errors import OverloadedError
from penstock.gateway.front.heap import trim_heap
from penstock.gateway.front.unread_answers import UnreadAnswers

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


class Intake:
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
