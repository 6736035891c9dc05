"""A process together with all that it has started, such as compilers and the workers of several devices."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from penstock.engines.host.crash_folder import signal_name
from penstock.engines.process.worker_process import WorkerProcess

_GRACE = 1.0
"""Seconds for those that end with the process: among them is Python's resource tracker, which removes shared memory."""
_LOOK = 0.02


async def kill_group(process: WorkerProcess) -> None:
    """Also ends what a process has left behind that is dead already. Nobody must do this again later: by then another
    group can have its number."""
    process.kill()
    await process.wait()
    with suppress(ProcessLookupError):  # nobody is left
        for _ in range(round(_GRACE / _LOOK)):
            os.killpg(process.pid, 0)
            await asyncio.sleep(_LOOK)
        os.killpg(process.pid, signal.SIGKILL)


def how_it_ended(status: int | None) -> str:
    """In words, of a process's exit status, which is negative after a signal."""
    if status == -signal.SIGKILL:
        return "killed, as the system does when memory runs out"
    return signal_name(status) or f"status {status}"
