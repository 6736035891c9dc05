"""A timer that is right to about a tenth of a millisecond: uvloop's count whole milliseconds, as epoll's waits do."""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import sys
from collections.abc import Callable
from time import perf_counter

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_EARLY = 20e-6
"""Seconds by which a wake-up may come early: going to sleep again takes longer."""


class _Spec(ctypes.Structure):
    """struct itimerspec: interval and value, in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class PreciseTimer:
    """Calls back at times of time.perf_counter, on the event loop that it is made on.

    On Linux by a timerfd, whose clock is perf_counter's; elsewhere by the loop's own timers, to a millisecond.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._armed = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._fd = (
            -1 if self._libc is None else self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        )
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._call_due)

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """At once, on the loop's next turn, when that time is over."""
        self._count += 1
        heapq.heappush(self._due, (when, self._count, callback))
        if when < self._armed:
            self._arm(when)

    def close(self) -> None:
        """Nothing is called any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, when: float) -> None:
        self._armed = when
        if self._fd >= 0 and self._libc is not None:
            seconds, rest = divmod(max(when, 1e-9), 1.0)  # a time of 0 would disarm it
            spec = _Spec(0, 0, int(seconds), int(rest * 1e9))
            self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, when - perf_counter()), self._call_due)

    def _call_due(self) -> None:
        if self._fd >= 0:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                return  # it was armed for later meanwhile
        self._armed = float("inf")
        due = self._due
        for _ in range(len(due)):  # what is added meanwhile waits for the next turn
            if not due or due[0][0] > perf_counter() + _EARLY:
                break
            heapq.heappop(due)[2]()
        if due and due[0][0] < self._armed:
            self._arm(due[0][0])
