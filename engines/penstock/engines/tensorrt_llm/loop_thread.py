"""An asyncio loop in a thread of its own: TensorRT-LLM gives results to the loop on which a request was handed over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Has it called on the loop, soon. From any thread."""
        self._loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits until it has run on the loop. Not from the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        """Cancels what runs on the loop."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
