"""Driving a client with a workload: closed loop (so many at a time) or open loop (at given times).

Open loop knows no coordinated omission: a call has an intended time, whether or not the server, or this process, was
able to take it then, and latencies are counted from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import msgspec

from penstock.loadtest.clients.base import Client
from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.messages import Answer, Call, Sample, Session


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are sent. Sessions with a time of their own are sent at that time whatever this says."""

    concurrency: int = 1
    """Closed loop: sessions at a time."""
    ramp: float = 0.0
    """Seconds over which the places of a closed loop are opened, evenly."""
    max_in_flight: int = 10_000
    """Open loop: most sessions at a time. What is due beyond that waits, and its latency counts the wait."""
    seconds: float | None = None
    """Nothing is begun after this; None: until the workload ends."""
    grace: float = 30.0
    """Seconds that running requests get then, before they are cut off and left out."""


class Driver:
    """One run of one workload on this process's event loop."""

    def __init__(
        self, client: Client, load: Load, started: float, on_sample: Callable[[Sample], None] | None = None
    ) -> None:
        self.samples: list[Sample] = []
        self.in_flight = 0
        self.begun = 0
        """Calls sent so far."""
        self._client = client
        self._load = load
        self._started = started
        """time.perf_counter at which the run starts; may lie ahead."""
        self._on_sample = on_sample
        self._stop = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._naps: set[asyncio.Future[None]] = set()

    def stop(self, *, now: bool = False) -> None:
        """Begins nothing any more; what runs gets the grace period, or is cut off now."""
        self._stop.set()
        if now and self._work is not None:
            self._work.cancel()
        for nap in self._naps:
            nap.cancel()

    async def run(self, sessions: Iterator[Session]) -> list[Sample]:
        """Returns when everything has ended, or was cut off. Samples are in the order of their ends."""
        await self._nap(self._started)
        limit = asyncio.create_task(self._end_at(self._load.seconds))
        work = self._work = asyncio.create_task(self._drive(sessions))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait((work,), timeout=self._load.grace)
        for task in (work, limit, stopped):
            task.cancel()
        results = await asyncio.gather(work, limit, stopped, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        return self.samples

    async def _end_at(self, seconds: float | None) -> None:
        if seconds is not None:
            await asyncio.sleep(self._started + seconds - perf_counter())
            self.stop()

    async def _nap(self, until: float) -> bool:
        """Waits for a time of time.perf_counter; False when the run is stopped meanwhile."""
        delay = until - perf_counter()
        if delay > 0 and not self._stop.is_set():
            loop = asyncio.get_running_loop()
            nap = loop.create_future()
            timer = loop.call_later(delay, _wake, nap)
            self._naps.add(nap)
            try:
                await asyncio.wait((nap,))
            finally:
                timer.cancel()
                self._naps.discard(nap)
        return not self._stop.is_set()

    async def _drive(self, sessions: Iterator[Session]) -> None:
        first = next(sessions, None)
        if first is None:
            return
        source = _chain(first, sessions)
        async with asyncio.TaskGroup() as group:
            if first.at is not None:
                await self._open_loop(source, group)
            else:
                for place in range(self._load.concurrency):
                    delay = self._load.ramp * place / self._load.concurrency
                    group.create_task(self._closed_loop(source, delay))

    async def _closed_loop(self, source: Iterator[Session], delay: float) -> None:
        if not await self._nap(self._started + delay):
            return
        for session in source:
            if self._stop.is_set():
                return
            await self._session(session, perf_counter())

    async def _open_loop(self, source: Iterator[Session], group: asyncio.TaskGroup) -> None:
        places = asyncio.Semaphore(self._load.max_in_flight)
        for session in source:
            due = self._started + (session.at or 0.0)
            if not await self._nap(due):
                return
            await places.acquire()
            if self._stop.is_set():
                return
            group.create_task(self._session(session, due)).add_done_callback(lambda _: places.release())

    async def _session(self, session: Session, due: float) -> None:
        """Sends its calls in order; one that fails ends it, since what follows needs the answer."""
        history: list[dict[str, Any]] = []
        for call in session.calls:
            if history:
                due = perf_counter() + call.delay
                if not await self._nap(due):
                    return
                history.append({"role": "user", "content": call.prompt})
                call = msgspec.structs.replace(call, prompt=history)
            elif len(session.calls) > 1:
                history = _beginning(call)
            answer = await self._call(call, due)
            if answer is None or answer.error:
                return
            history.append({"role": "assistant", "content": answer.text or ""})

    async def _call(self, call: Call, due: float) -> Answer | None:
        self.in_flight += 1
        self.begun += 1
        try:
            answer = await self._client.send(call)
        except asyncio.CancelledError:
            now = perf_counter()
            self._note(call, due, Answer(sent=now, ended=now, error=INTERRUPTED))
            raise
        finally:
            self.in_flight -= 1
        self._note(call, due, answer)
        return answer

    def _note(self, call: Call, due: float, answer: Answer) -> None:
        start = self._started
        sample = Sample(
            index=call.index,
            tag=call.tag,
            intended=due - start,
            sent=answer.sent - start,
            ended=answer.ended - start,
            connect=answer.connect,
            arrivals=[time - start for time in answer.arrivals],
            pieces=answer.pieces,
            reads=answer.reads,
            wanted_prompt_tokens=call.prompt_tokens,
            wanted_output_tokens=call.output_tokens,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            error=answer.error,
            detail=answer.detail,
        )
        self.samples.append(sample)
        if self._on_sample is not None:
            self._on_sample(sample)


def _chain(first: Session, rest: Iterator[Session]) -> Iterator[Session]:
    yield first
    yield from rest


def _wake(nap: asyncio.Future[None]) -> None:
    if not nap.done():
        nap.set_result(None)


def _beginning(call: Call) -> list[dict[str, Any]]:
    """The history that the session's later calls go on from."""
    if isinstance(call.prompt, str):
        return [{"role": "user", "content": call.prompt}]
    return [message for message in call.prompt if isinstance(message, dict)]
