"""Long answers are taken apart in a thread, beside the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from penstock.loadtest.messages import Answer

_LONG_READS = 32
"""Reads from which on an answer is worth a thread's while: before, taking it apart takes about 0.1 ms."""
_BACKLOG = 256
"""Answers that wait, whole in memory. With more, those that bring one wait, too."""
_SWITCH_SECONDS = 1e-4
"""For so long the thread may keep the event loop waiting. Python's own setting is 50 times that."""


class AnswerThread:
    """The event loop interrupts its work whenever a token comes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "answers")
        self._running: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setswitchinterval(self._interval)
        self._thread.shutdown(cancel_futures=True)

    async def complete(self, answer: Answer, then: Callable[[], None], *, wait: bool) -> None:
        """Completes an answer and calls `then` on the event loop: before it returns, if it is to `wait`. Cancellation
        does not stop it."""
        if answer.rest is None or answer.reads < _LONG_READS:
            answer.complete()
            then()
            return
        task = asyncio.create_task(self._work(answer, then))
        self._running.add(task)
        task.add_done_callback(self._ended)
        if wait or len(self._running) > _BACKLOG:
            await asyncio.wait((task,))

    async def _work(self, answer: Answer, then: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, answer.complete)
        then()

    async def finish(self) -> None:
        """Until nothing is left. Raises what taking apart raised."""
        if self._running:
            await asyncio.wait(self._running)
        if self._error is not None:
            raise self._error

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._error = self._error or (None if task.cancelled() else task.exception())
