"""What glibc does with memory that is freed. Other C libraries have nothing of the kind."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt(3)."""
_KEPT_BYTES = 32 << 20
_OWN_MAPPING_BYTES = 8 << 20


def keep_freed_memory() -> None:
    """From now on some freed memory stays for the next large message. By default glibc gives the memory of each body
    back as soon as it is freed and asks for it again with the next one: the kernel then fills every page with zeros,
    which costs many times what is done with the body."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def trim_heap() -> None:
    """Gives back what is kept, also where smaller things lie behind it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
