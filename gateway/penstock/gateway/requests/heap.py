"""Settings of a serving process's heap: Python's garbage collection, and the memory that glibc keeps."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt(3)."""
_KEPT_BYTES = 32 << 20
_OWN_MAPPING_BYTES = 8 << 20
_COLLECTED_AFTER = 20_000
"""Objects that may refer to others, made and not yet freed. Python's 700 are what a dozen requests in flight hold: with
hundreds, it would look through all of them again and again, and find nothing to free."""


def settle() -> None:
    """Once all is made that lives as long as the process: no collection looks at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER, *gc.get_threshold()[1:])
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Of glibc; other C libraries have nothing of the kind. From now on some freed memory stays for the next large
    message. By default glibc gives the memory of each body back as soon as it is freed and asks for it again with the
    next one: the kernel then fills every page with zeros, which costs many times what is done with the body."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def trim_heap() -> None:
    """Gives back what is kept, also where smaller things lie behind it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
