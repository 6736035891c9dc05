"""Calls that may go down deeper than the stack of a thread allows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_BYTES = 1 << 29
"""Of address space: only what is used of it takes memory. llguidance compiles what a rule or a schema refers to inside
of what refers to it, and has no bound on that. A character of a grammar takes less than 1 kB of stack."""

_T = TypeVar("_T")
_starting = threading.Lock()


def on_deep_stack(work: Callable[[], _T]) -> _T:
    """What `work` gives, or raises, in a thread of its own. A stack that overflows ends the whole process."""
    with _starting:  # the size holds for all threads that start from now on
        usual = threading.stack_size(_BYTES)
        try:
            executor = ThreadPoolExecutor(1, "deep-stack")
            result = executor.submit(work)
        finally:
            threading.stack_size(usual)
    with executor:
        return result.result()
