"""Memory of a process that loads a model: pages given back while it loads, huge pages under what stays.

The plugin packs every matrix into memory of its own, in one go at the first tokens, and quantizing reads every tensor
once. What was read of the mapped files would stay in memory beside the result until the end: twice what is needed.

A step of a single request reads all weights; with 4 KiB pages a tenth of its time goes into address translation. The
plugin's own memory cannot be had in huge pages when it is allocated, so what it holds is collapsed after it was filled.
Where the kernel does not know how, or has no huge pages to give, everything stays as it is.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.engines.host.kernel_files import kernel_text

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


_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Linux 6.1: at once, instead of whenever the kernel's own thread comes by."""
_PORTION = 16 * _HUGE_PAGE
_SMALLEST = 2 * _HUGE_PAGE
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f:]+ 0\s*(?:\[heap\])?")


def collapse_filled_memory(seconds: float) -> None:
    """Puts huge pages under all large anonymous memory of this process that is mostly in use; stops after `seconds`.

    It copies everything once (one to three seconds for a gigabyte on a busy machine). A process that is started with
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 leaves nothing to do here.
    """
    if sys.platform != "linux":
        return
    madvise, deadline = _madvise(), time.monotonic() + seconds
    for start, end in _filled(Path("/proc/self/smaps")):
        madvise(start, end - start, _MADV_HUGEPAGE)
        for part in range(start, end, _PORTION):
            if time.monotonic() > deadline:
                return
            madvise(part, min(_PORTION, end - part), _MADV_COLLAPSE)


def prefer_huge_pages(address: int, length: int) -> None:
    """For memory that is not in use yet: what is touched of it comes in huge pages."""
    start, end = -(-address // _HUGE_PAGE) * _HUGE_PAGE, (address + length) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform == "linux" and end > start:
        _madvise()(start, end - start, _MADV_HUGEPAGE)


def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _filled(smaps: Path) -> Iterator[tuple[int, int]]:
    """Address ranges of large private anonymous mappings of which at least half is resident.

    The others (stacks, tables that are mostly empty) would only grow.
    """
    mapping: tuple[int, int] | None = None
    for line in kernel_text(smaps).splitlines():
        match = _MAPPING.fullmatch(line.rstrip())
        if match is not None:
            mapping = int(match[1], 16), int(match[2], 16)
        elif mapping is not None and line.startswith("Rss:"):
            size = mapping[1] - mapping[0]
            if size >= _SMALLEST and int(line.split()[1]) * 1024 * 2 >= size:
                yield mapping
            mapping = None
