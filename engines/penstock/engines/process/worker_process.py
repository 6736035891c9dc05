"""An engine process, as the process that starts it sees it.

It may be started before it is known what it will load, and imports what it needs while the gateway does the same: that
takes each of them about a second. This module imports little, so that it comes first.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress

from penstock.engines.host.black_box import BlackBox

_TUNABLES = "glibc.malloc.hugetlb=1"
"""Weights are put into huge pages from the start, which makes steps faster; ignored where there are none."""

_started: dict[str, WorkerProcess] = {}
"""Nobody has used these yet. By the engine that they expect."""


class WorkerProcess:
    def __init__(self, engine: str = "", without: Collection[str] = ()) -> None:
        """`engine`: what it imports until it gets its order. `without`: variables of the environment that it does not
        get. Raises OSError."""
        self.box = BlackBox()
        box = self.box.descriptor
        reading, writing = os.pipe()
        environ = {"GLIBC_TUNABLES": _TUNABLES} | os.environ
        self.heartbeats = os.fdopen(reading, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.engines.process.worker", str(writing), str(box), engine],
                pass_fds=(writing, box),
                stdin=subprocess.PIPE,
                start_new_session=True,
                env={name: value for name, value in environ.items() if name not in without},
            )
        finally:
            os.close(writing)
        self._ended: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None: it has not ended, as far as this process has noticed."""
        return self._process.poll()

    async def order(self, line: bytes) -> None:
        """What it has to do; see `registry.Order`. Does nothing when it has ended: `wait` tells that."""
        await asyncio.to_thread(self._write, line)

    def _write(self, line: bytes) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(line)
                self._process.stdin.flush()

    async def wait(self) -> int:
        """Its exit status."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            threading.Thread(target=self._watch, args=(loop, self._ended), name="engine process", daemon=True).start()
        return await asyncio.shield(self._ended)

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[int]) -> None:
        status = self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set_result, status)

    def tell_to_end(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Not what it has started: `client.kill_group`."""
        self._process.kill()

    def reap(self) -> None:
        """Blocks until it has ended."""
        self._process.wait()


def start_early(engine: str, without: Collection[str] = ()) -> None:
    """A process for `new_worker`. Where there can be none, that tells why."""
    with suppress(OSError):
        _started[engine] = WorkerProcess(engine, without)


def new_worker(engine: str) -> WorkerProcess:
    """Raises OSError."""
    early = _started.pop(engine, None)
    return WorkerProcess() if early is None or early.returncode is not None else early


def end_unused() -> None:
    """Those that were started early and are not needed."""
    while _started:
        _, process = _started.popitem()
        process.kill()
        process.reap()
