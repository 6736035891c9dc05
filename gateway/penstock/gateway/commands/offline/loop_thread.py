"""An event loop in a thread of its own, so that programs can wait for it, whether they run a loop themselves or not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from penstock.gateway.models.language.dataplane import ChoiceDelta, Generation


class AnswerStream(Iterator[ChoiceDelta]):
    """Closing it, or giving it up, aborts what still runs. A reader that is slow gets more text at once."""

    def __init__(self, owner: object, thread: LoopThread, generation: Generation) -> None:
        """`owner` is not given up before the stream is."""
        self._owner = owner
        self._thread = thread
        self._generation = generation
        self._ready: deque[ChoiceDelta] = deque()

    def __next__(self) -> ChoiceDelta:
        """Raises the PenstockError that ended a choice, if one did."""
        while not self._ready:
            deltas = self._thread.run(self._more())
            if deltas is None:
                raise StopIteration
            self._ready += deltas
        return self._ready.popleft()

    async def _more(self) -> list[ChoiceDelta] | None:
        return await anext(self._generation, None)

    def close(self) -> None:
        self._ready.clear()
        self._thread.soon(self._generation.close)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


_T = TypeVar("_T")


class ClosedError(RuntimeError):
    """It was closed, or belongs to the process that this one was forked from."""


class LoopThread:
    """Any thread may use it, its own excepted."""

    def __init__(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """`farewell` runs on the loop, as its last."""
        self._farewell = farewell
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="penstock-llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left, and closes the loop
            runner.run(self._live())

    async def _live(self) -> None:
        await self._end.wait()
        await self._farewell()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Waits for the result. Ctrl-C cancels the work. Raises ClosedError, and what the work raises."""
        if not self._usable:
            work.close()
            raise ClosedError("This LLM is closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClosedError("This LLM was closed meanwhile.") from None
        except BaseException:
            future.cancel()
            raise

    def soon(self, call: Callable[[], object]) -> None:
        """Calls it on the loop, without waiting: the garbage collector may ask for this in any thread."""
        if self._usable:
            self._loop.call_soon_threadsafe(call)

    @property
    def _usable(self) -> bool:
        return os.getpid() == self._process and not self._end.is_set() and self._thread.is_alive()

    def close(self) -> None:
        """Waits for the end, except in the loop's own thread, where the garbage collector may call this."""
        self.soon(self._end.set)
        if os.getpid() == self._process and threading.current_thread() is not self._thread:
            self._thread.join()
