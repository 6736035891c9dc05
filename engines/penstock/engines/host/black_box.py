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
import weakref

from penstock.engines.contract.step_ring import STEPS_BYTES, StepRing, StepRow, read_steps
from penstock.engines.host.memory import memory_events

_MOST_STACK_BYTES = 1 << 16
DUMP_SIGNAL = signal.SIGUSR2
"""Makes a child write the stacks of all its threads and go on."""


class BlackBox:
    """The parent's end, made for one child."""

    def __init__(self) -> None:
        """Raises OSError when there can be no file."""
        self.descriptor = os.memfd_create("penstock-black-box")
        """For the child to inherit."""
        self.close = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, STEPS_BYTES)
        os.lseek(self.descriptor, STEPS_BYTES, os.SEEK_SET)  # the child writes its stacks from there
        self.memory_events = memory_events()
        """At the child's start."""

    def steps(self) -> list[StepRow]:
        return read_steps(os.pread(self.descriptor, STEPS_BYTES, 0))

    def stacks(self) -> str:
        """What the child's faulthandler has written; "" where nothing has asked for it."""
        return os.pread(self.descriptor, _MOST_STACK_BYTES, STEPS_BYTES).decode("utf-8", "replace")


def record_into(descriptor: int) -> StepRing:
    """In the child, first of all: from now on a crash leaves its stack behind. `descriptor` is the inherited one."""
    os.set_inheritable(descriptor, False)
    faulthandler.enable(descriptor)
    faulthandler.register(DUMP_SIGNAL, descriptor)
    return StepRing(mmap.mmap(descriptor, STEPS_BYTES))


def dump_stacks(pid: int) -> None:
    """Has a child of this process write what it is doing; nothing waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
