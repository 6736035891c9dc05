"""Keeps a process small while it loads a model.

The plugin packs every matrix into memory of its own, in one go at the first tokens, and quantizing reads every tensor
once. What was read of the mapped files would stay in memory beside the result until the end: twice what is needed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERVAL = 0.02
"""Seconds, in which some 20 MB are packed. Pages that are still needed are mapped again, which takes microseconds."""


@contextmanager
def mapped_pages_released(release: Callable[[], None], interval: float = _INTERVAL) -> Iterator[None]:
    """Inside, and at the end, `release` gives back the mapped pages that were read, on a thread of its own; at the end
    the C library also gives back what was freed."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(interval):
            release()

    thread = threading.Thread(target=work, name="penstock-mapped-pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        release()
        return_freed_memory()


def return_freed_memory() -> None:
    """Without it, glibc keeps memory that was freed between other allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
