"""Wake-ups within microseconds: the timers of event loops are no finer than a millisecond, queue delays often are.

timerfd_create(2) gives a file descriptor that is readable when the time has come. Where there is none, the loop's own
timers have to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from time import monotonic_ns

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
"""TFD_NONBLOCK and TFD_CLOEXEC have these values."""
_SECOND = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class FineTimer:
    """Calls back once at the latest time that was set, or a little after it. Lives on the event loop."""

    def __init__(self, loop: AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1 if self._libc is None else self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        self._when = _Itimerspec()
        if self._fd >= 0:
            loop.add_reader(self._fd, self._expired)

    def set(self, when_ns: int) -> None:
        """`when_ns` of time.monotonic_ns()."""
        if self._libc is None or self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0, when_ns - monotonic_ns()) / _SECOND, self._callback)
            return
        value = self._when.value
        value.seconds, value.nanoseconds = divmod(max(when_ns, 1), _SECOND)
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._when), None)

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set again since
            os.read(self._fd, 8)
            self._callback()

    def close(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
