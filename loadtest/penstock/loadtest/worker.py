"""A client process: `python -m penstock.loadtest.worker`, frames on stdin and stdout.

It does nothing but send and take times; the process that started it shows progress, watches the server and computes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice

from penstock.loadtest import workload
from penstock.loadtest.clients.base import Client
from penstock.loadtest.clients.settings import make_client
from penstock.loadtest.drive import Driver, Load
from penstock.loadtest.errors import CONNECT, LoadTestError
from penstock.loadtest.job import Done, Failed, Job, Progress, Ready, Start, Stop, decode_down, receive, send
from penstock.loadtest.messages import Sample, Session

_PROGRESS_SECONDS = 0.25
_LOOK_SECONDS = 0.02
_WARMUP_SEED = 0x5EED
_OWN_FILES = 64
"""Beside the connections."""
_AHEAD_SECONDS, _AHEAD = 1.0, 20_000
"""Sessions are made before the run, for so long and so many of them; the others when their turn comes."""


class Worker:
    """One job, and nothing after it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._start: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._driver: Driver | None = None
        self._stopped: Stop | None = None
        self._samples: list[Sample] = []
        self._lag: list[float] = []

    async def run(self) -> None:
        """Until the run is over, or nobody is there any more."""
        frame = await receive(self._reader)
        job = None if frame is None else decode_down(frame)
        if not isinstance(job, Job):
            return
        work = asyncio.create_task(self._work(job))
        helpers = [asyncio.create_task(step) for step in (self._obey(work), self._report(), self._watch())]
        await asyncio.wait((work,))
        for task in helpers:
            task.cancel()
        error = None if work.cancelled() else work.exception()
        if isinstance(error, LoadTestError):
            send(self._writer, Failed(str(error)))
        elif error is not None:
            raise error

    async def _work(self, job: Job) -> None:
        options, load = job.options, _load(job)
        few = options.open_loop or options.target.protocol.startswith("kserve-grpc")
        _allow_connections(0 if few else load.concurrency)
        client = make_client(options.target, keep_text=workload.keeps_text(options.workload), defer=True)
        await client.open()
        try:
            if job.part == 0:
                await _warm_up(client, job)
            sessions = _made_ahead(workload.build(options, seed=job.seed, part=job.part, parts=job.parts))
            gc.collect()
            gc.freeze()
            send(self._writer, Ready())
            start = await self._start
            driver = self._driver = Driver(client, load, start.at, self._samples.append)
            if self._stopped is not None:
                driver.stop(now=self._stopped.now)
            await asyncio.sleep(max(0.0, start.at - time.perf_counter()))
            self._lag.clear()
            cpu, wall = time.process_time(), time.perf_counter()
            await driver.run(sessions)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            self._driver = None  # nothing is reported after this
            send(self._writer, Progress(self._samples, 0))
            send(self._writer, Done(cpu_seconds=cpu, wall_seconds=wall, lag_ms=self._lag, held_up=driver.held_up))
        finally:
            await client.close()

    async def _obey(self, work: asyncio.Task[None]) -> None:
        """Starts and stops the run when told so; ends it when nobody is there any more."""
        while True:
            frame = await receive(self._reader)
            message = Stop(now=True) if frame is None else decode_down(frame)
            if isinstance(message, Start):
                self._start.set_result(message)
            elif isinstance(message, Stop) and self._driver is not None:
                self._driver.stop(now=message.now)
            elif isinstance(message, Stop) and self._start.done():
                self._stopped = message
            else:
                work.cancel()
            if frame is None:
                return

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            if self._driver is not None:
                send(self._writer, Progress(self._samples, self._driver.in_flight))
                self._samples.clear()

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + _LOOK_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
            self._lag.append(round(max(0.0, time.perf_counter() - due) * 1e3, 3))


def _load(job: Job) -> Load:
    """This process's share of the load."""
    load = job.options.load
    places = len(range(job.part, load.concurrency, job.parts))
    return Load(
        concurrency=places,
        ramp=load.ramp,
        max_in_flight=-(-load.max_in_flight // job.parts),
        seconds=load.duration,
        grace=load.grace,
    )


def _made_ahead(sessions: Iterator[Session]) -> Iterator[Session]:
    """The same sessions. Long prompts take milliseconds to make: during the run that would be lost to the clock."""
    ready: list[Session] = []
    until = time.perf_counter() + _AHEAD_SECONDS
    for session in islice(sessions, _AHEAD):
        ready.append(session)
        if time.perf_counter() > until:
            break
    return chain(ready, sessions)


async def _warm_up(client: Client, job: Job) -> None:
    """Requests that do not count. Raises LoadTestError when there is nobody to talk to."""
    calls = workload.build(job.options, seed=job.seed ^ _WARMUP_SEED, part=0, parts=1)
    for session in islice(calls, job.options.load.warmup):
        answer = await client.send(session.calls[0])
        if answer.error == CONNECT:
            raise LoadTestError(f"no answer from {job.options.target.url}: {answer.detail}")


async def _main() -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    frames = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever else writes to standard output must not end up between the frames
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, frames)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        await Worker(reader, writer).run()
    finally:
        transport.set_write_buffer_limits(0)
        await _flushed(writer)
    return 0


def _allow_connections(number: int) -> None:
    """Each is a file; shells allow a process 1024, the system mostly more to who asks. Raises LoadTestError where that
    does not do."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        now = most
    if now != resource.RLIM_INFINITY and number + _OWN_FILES > now:
        raise LoadTestError(
            f"concurrency: {number} connections need more than the {now} files that a process may open "
            "(ulimit -n); --processes shares them out"
        )


async def _flushed(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.drain()
    except ConnectionError:
        return  # its reader is gone


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command says when to stop
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main())


if __name__ == "__main__":
    sys.exit(main())
