"""The client processes of one run, seen from the command."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

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
    started: float = 0.0
    """time.perf_counter."""
    unix_time: float = 0.0
    """Of the start."""


class Fleet:
    """Starts `processes` clients, lets them begin at the same moment, and collects what they measure."""

    def __init__(self, options: Options, processes: int, seed: int) -> None:
        self.in_flight = [0] * processes
        self._options = options
        self._seed = seed
        self._processes: list[asyncio.subprocess.Process] = []
        self._num = processes

    async def run(self, on_samples: Callable[[Sequence[Sample]], None] = lambda samples: None) -> RunResult:
        """Raises LoadTestError when the run cannot be. A process that dies leaves what it had reported."""
        result = RunResult()
        try:
            await asyncio.gather(*(self._spawn(part) for part in range(self._num)))
            await asyncio.gather(*(self._ready(process) for process in self._processes))
            result.started, result.unix_time = time.perf_counter() + _HEAD_START, time.time() + _HEAD_START
            for process in self._processes:
                self._tell(process, Start(result.started))
            await asyncio.gather(
                *(self._collect(part, process, result, on_samples) for part, process in enumerate(self._processes))
            )
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(*(process.wait() for process in self._processes))
        return result

    def stop(self, *, now: bool = False) -> None:
        """Nothing is begun any more; `now`: what runs is cut off."""
        for process in self._processes:
            self._tell(process, Stop(now))

    async def _spawn(self, part: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.loadtest.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours: we tell them
        )
        self._processes.append(process)
        self._tell(process, Job(options=self._options, part=part, parts=self._num, seed=self._seed))

    @staticmethod
    def _tell(process: asyncio.subprocess.Process, frame: Job | Start | Stop) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            send(process.stdin, frame)

    @staticmethod
    async def _next(process: asyncio.subprocess.Process) -> Ready | Failed | Progress | Done | None:
        if process.stdout is None:
            return None
        frame = await receive(process.stdout)
        return None if frame is None else decode_up(frame)

    async def _ready(self, process: asyncio.subprocess.Process) -> None:
        message = await self._next(process)
        if isinstance(message, Failed):
            raise LoadTestError(message.message)
        if not isinstance(message, Ready):
            raise LoadTestError("a client process ended before it could begin")

    async def _collect(
        self,
        part: int,
        process: asyncio.subprocess.Process,
        result: RunResult,
        on_samples: Callable[[Sequence[Sample]], None],
    ) -> None:
        while (message := await self._next(process)) is not None:
            if isinstance(message, Progress):
                self.in_flight[part] = message.in_flight
                result.samples += message.samples
                on_samples(message.samples)
            elif isinstance(message, Done):
                result.clients.append(message)
                return
            elif isinstance(message, Failed):
                raise LoadTestError(message.message)
