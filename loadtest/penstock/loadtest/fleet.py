"""The client processes of one run, seen from the command."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.job import Done, Failed, Job, Progress, Ready, Start, Stop, decode_up, receive, send
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options

_HEAD_START = 0.1
"""Seconds between the word to start and the start, so that all processes have heard it."""


class RunResult(msgspec.Struct, kw_only=True):
    """What the client processes of one run have measured."""

    samples: list[Sample] = []
    clients: list[Done] = []
    """One for each process that came to its end."""
    lost: int = 0
    """Processes that did not: what they had not told by then is in no figure."""
    started: float = 0.0
    """time.perf_counter."""
    unix_time: float = 0.0
    """Of the start."""


class Fleet:
    """Starts `processes` clients, lets them begin at the same moment, and collects what they measure. Use as
    `async with Fleet(...) as fleet`: then they are ready, and at the end they are gone."""

    def __init__(self, options: Options, processes: int, seed: int) -> None:
        self.in_flight = [0] * processes
        self.begun = False
        """All were ready, and have been told to start."""
        self._options = options
        self._seed = seed
        self._processes: list[asyncio.subprocess.Process] = []
        self._num = processes
        self._given_up = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Raises LoadTestError when the run cannot be, or is stopped before it begins."""
        ready = asyncio.create_task(self._prepare())
        given_up = asyncio.create_task(self._given_up.wait())
        try:
            await asyncio.wait((ready, given_up), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise LoadTestError("stopped before anything was measured")
            await ready
        except BaseException:
            ready.cancel()
            with suppress(asyncio.CancelledError, LoadTestError):
                await ready
            await self._end()
            raise
        finally:
            given_up.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._end()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def run(self, on_samples: Callable[[Sequence[Sample]], None] = lambda samples: None) -> RunResult:
        """Raises LoadTestError when the run turns out not to be possible. A process that dies leaves what it had told
        by then."""
        self.begun = True
        result = RunResult(started=time.perf_counter() + _HEAD_START, unix_time=time.time() + _HEAD_START)
        for process in self._processes:
            _tell(process, Start(result.started))
        if self._given_up.is_set():
            self.stop()
        await asyncio.gather(
            *(self._collect(part, process, result, on_samples) for part, process in enumerate(self._processes))
        )
        return result

    def stop(self, *, now: bool = False) -> None:
        """Nothing is begun any more; `now`: what runs is cut off."""
        self._given_up.set()
        if self.begun:
            for process in self._processes:
                _tell(process, Stop(now))

    def kill(self) -> None:
        """At once, with what has been told until now."""
        self._given_up.set()
        for process in self._processes:
            kill(process)

    async def _prepare(self) -> None:
        await asyncio.gather(*(self._spawn(part) for part in range(self._num)))
        await asyncio.gather(*(_ready(process) for process in self._processes))

    async def _end(self) -> None:
        self.kill()
        await asyncio.gather(*(_ended(process) for process in self._processes))

    async def _spawn(self, part: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "penstock.loadtest.worker"),  # -P: no modules from where the user stands
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours: we tell them
        )
        self._processes.append(process)
        _tell(process, Job(options=self._options, part=part, parts=self._num, seed=self._seed))

    async def _collect(
        self,
        part: int,
        process: asyncio.subprocess.Process,
        result: RunResult,
        on_samples: Callable[[Sequence[Sample]], None],
    ) -> None:
        while (message := await _next(process)) is not None:
            if isinstance(message, Progress):
                self.in_flight[part] = message.in_flight
                result.samples += message.samples
                on_samples(message.samples)
            elif isinstance(message, Done):
                result.clients.append(message)
                return
            elif isinstance(message, Failed):
                raise LoadTestError(message.message)
        self.in_flight[part] = 0
        result.lost += 1


def kill(process: asyncio.subprocess.Process) -> None:
    """At once; nothing, if it has ended. Process.kill of Python before 3.13 asks first how the process is, which takes
    its exit status away from the watcher that waits for it: 'Unknown child process' is what that then logs
    (github.com/python/cpython/issues/87744)."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """asyncio waits for the end of the pipes, too, and sees no end behind what nobody reads."""
    if process.stdout is not None:
        with suppress(RuntimeError):  # it is being read
            await process.stdout.read()
    await process.wait()


def _tell(process: asyncio.subprocess.Process, frame: Job | Start | Stop) -> None:
    if process.stdin is not None and not process.stdin.is_closing():
        send(process.stdin, frame)


async def _next(process: asyncio.subprocess.Process) -> Ready | Failed | Progress | Done | None:
    if process.stdout is None:
        return None
    frame = await receive(process.stdout)
    return None if frame is None else decode_up(frame)


async def _ready(process: asyncio.subprocess.Process) -> None:
    message = await _next(process)
    if isinstance(message, Failed):
        raise LoadTestError(message.message)
    if not isinstance(message, Ready):
        raise LoadTestError(f"a client process ended before it could begin (status {await process.wait()})")
