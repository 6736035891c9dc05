"""Threads for one kind of work on requests, and a bound on the work that waits for them."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from penstock.engines.errors import OverloadedError

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
