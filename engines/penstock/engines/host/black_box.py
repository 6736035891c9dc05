"""The black box of a child process: its last steps and, when it crashes, its stack, in memory that its parent holds.

Both have an anonymous file: the child writes each step to it and has Python's faulthandler write stacks behind them.
What is there survives whatever ends the child, SIGKILL included, and goes with the parent. It holds counts and times,
files and functions: no text and no token of a request.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import weakref
from typing import NamedTuple

from penstock.engines.host.memory import memory_events

NUM_STEPS = 256
"""That are kept: the newest."""
_ROW = struct.Struct("=Qdd5q")
_SECONDS = struct.Struct("=d")
_SECONDS_AT = 16
"""Where in a row its seconds are."""
_STEPS_BYTES = NUM_STEPS * _ROW.size
_MOST_STACK_BYTES = 1 << 16
_FAILED = -1.0
DUMP_SIGNAL = signal.SIGUSR2
"""Makes a child write the stacks of all its threads and go on."""


class StepRow(NamedTuple):
    """One step as it was scheduled."""

    number: int
    """From 1."""
    scheduled_at: float
    """Seconds of the monotonic clock, which all processes of a machine share."""
    seconds: float
    """Until its result came; 0: it was under way; -1: it raised."""
    num_requests: int
    """In the step."""
    num_tokens: int
    """Of all of them, in the step."""
    num_running: int
    num_waiting: int
    num_free_blocks: int


class StepRing:
    """The child's end: what it writes costs a step about a microsecond."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        """`memory` has room for all rows; what is in it is overwritten."""
        self._memory = memory
        self._begun = 0
        self._ended = 0

    def begins(self, now: float, requests: int, tokens: int, running: int, waiting: int, free_blocks: int) -> None:
        """A step is handed to the model."""
        self._begun = number = self._begun + 1
        offset = number % NUM_STEPS * _ROW.size
        _ROW.pack_into(self._memory, offset, number, now, 0.0, requests, tokens, running, waiting, free_blocks)

    def ends(self, seconds: float) -> None:
        """The oldest step under way has its result."""
        self._ended = number = self._ended + 1
        _SECONDS.pack_into(self._memory, number % NUM_STEPS * _ROW.size + _SECONDS_AT, seconds)

    def fails(self) -> None:
        """A step has raised: no step is under way any more."""
        while self._ended < self._begun:
            self.ends(_FAILED)


def read_steps(memory: bytes) -> list[StepRow]:
    """What is in a ring, in order."""
    rows = (StepRow(*fields) for fields in _ROW.iter_unpack(memory[:_STEPS_BYTES]))
    return sorted(row for row in rows if row.number)


class BlackBox:
    """The parent's end, made for one child."""

    def __init__(self) -> None:
        """Raises OSError when there can be no file."""
        self.descriptor = os.memfd_create("penstock-black-box")
        """For the child to inherit."""
        self.close = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, _STEPS_BYTES)
        os.lseek(self.descriptor, _STEPS_BYTES, os.SEEK_SET)  # the child writes its stacks from there
        self.memory_events = memory_events()
        """At the child's start."""

    def steps(self) -> list[StepRow]:
        return read_steps(os.pread(self.descriptor, _STEPS_BYTES, 0))

    def stacks(self) -> str:
        """What the child's faulthandler has written; "" where nothing has asked for it."""
        return os.pread(self.descriptor, _MOST_STACK_BYTES, _STEPS_BYTES).decode("utf-8", "replace")


def record_into(descriptor: int) -> StepRing:
    """In the child, first of all: from now on a crash leaves its stack behind. `descriptor` is the inherited one."""
    os.set_inheritable(descriptor, False)
    faulthandler.enable(descriptor)
    faulthandler.register(DUMP_SIGNAL, descriptor)
    return StepRing(mmap.mmap(descriptor, _STEPS_BYTES))


def unrecorded() -> StepRing:
    """For an engine whose process has no parent to look at it."""
    return StepRing(bytearray(_STEPS_BYTES))


def dump_stacks(pid: int) -> None:
    """Has a child of this process write what it is doing; nothing waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
