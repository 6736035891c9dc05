"""An event loop in a thread of its own, so that programs can wait for it, whether they run a loop themselves or not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

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
