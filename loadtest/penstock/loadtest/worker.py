"""A client process: `python -m penstock.loadtest.worker`, frames on stdin and stdout.

It does nothing but send and take times; whoever started it shows progress, watches the server and computes.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from itertools import islice
from typing import TypeVar

from penstock.loadtest import workload
from penstock.loadtest.clients.base import Client
from penstock.loadtest.clients.registry import make_client
from penstock.loadtest.drive import Driver, Load
from penstock.loadtest.errors import CONNECT, LoadTestError
from penstock.loadtest.job import Done, Failed, Job, Progress, Ready, Start, Stop, decode_down, receive, send
from penstock.loadtest.messages import Sample

Message = TypeVar("Message", Job, Start)

_PROGRESS_SECONDS = 0.25
_LOOK_SECONDS = 0.02
_WARMUP_SEED = 0x5EED


async def run(reader: asyncio.StreamReader) -> None:
    """Raises LoadTestError when the run cannot be."""
    job = await _next(reader, Job)
    options = job.options
    client = make_client(options.target, keep_text=workload.keeps_text(options.workload), seed=job.seed)
    await client.open()
    try:
        if job.part == 0:
            await _warm_up(client, job)
        sessions = workload.build(options, seed=job.seed, part=job.part, parts=job.parts)
        gc.collect()
        gc.freeze()
        send(sys.stdout.buffer, Ready())
        sys.stdout.buffer.flush()
        start = await _next(reader, Start)
        samples: list[Sample] = []
        driver = Driver(client, _load(job), start.at, samples.append)
        helpers = [asyncio.create_task(_obey(reader, driver)), asyncio.create_task(_report(driver, samples))]
        lag: list[float] = []
        helpers.append(asyncio.create_task(_watch(lag)))
        await asyncio.sleep(max(0.0, start.at - time.perf_counter()))
        cpu, wall = time.process_time(), time.perf_counter()
        await driver.run(sessions)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        for task in helpers:
            task.cancel()
        send(sys.stdout.buffer, Progress(samples, 0))
        send(sys.stdout.buffer, Done(cpu_seconds=cpu, wall_seconds=wall, lag_ms=lag))
    finally:
        await client.close()


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


async def _warm_up(client: Client, job: Job) -> None:
    """Requests that do not count. Raises LoadTestError when there is nobody to talk to."""
    calls = workload.build(job.options, seed=job.seed ^ _WARMUP_SEED, part=0, parts=1)
    for session in islice(calls, job.options.load.warmup):
        answer = await client.send(session.calls[0])
        if answer.error == CONNECT:
            raise LoadTestError(f"no answer from {job.options.target.url}: {answer.detail}")


async def _obey(reader: asyncio.StreamReader, driver: Driver) -> None:
    """Stops the run when told so, and when nobody is there any more."""
    while True:
        frame = await receive(reader)
        message = Stop(now=True) if frame is None else decode_down(frame)
        if isinstance(message, Stop):
            driver.stop(now=message.now)
        if frame is None:
            return


async def _report(driver: Driver, samples: list[Sample]) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        send(sys.stdout.buffer, Progress(samples, driver.in_flight))
        sys.stdout.buffer.flush()
        samples.clear()


async def _watch(lag: list[float]) -> None:
    while True:
        due = time.perf_counter() + _LOOK_SECONDS
        await asyncio.sleep(_LOOK_SECONDS)
        lag.append(round(max(0.0, time.perf_counter() - due) * 1e3, 3))


async def _next(reader: asyncio.StreamReader, kind: type[Message]) -> Message:
    frame = await receive(reader)
    message = None if frame is None else decode_down(frame)
    if not isinstance(message, kind):
        raise LoadTestError("the client process was given up before it began")
    return message


async def _main() -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        await run(reader)
    except LoadTestError as error:
        send(sys.stdout.buffer, Failed(str(error)))
    finally:
        sys.stdout.buffer.flush()
    return 0


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
