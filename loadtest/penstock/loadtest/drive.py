"""Driving a client with a workload: closed loop (so many at a time) or open loop (at given times).

Open loop knows no coordinated omission: a call has an intended time, whether or not the server, or this process, was
able to take it then, and latencies are counted from it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.loadtest.clients.base import Client
from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.messages import Answer, Call, Sample, Session
from penstock.loadtest.precise_timer import PreciseTimer

_LONG_READS = 32
"""Reads from which on an answer is worth a thread's while: before, taking it apart takes about 0.1 ms."""
_BACKLOG = 256
"""Answers that wait, whole in memory. With more, those that bring one wait, too."""
_SWITCH_SECONDS = 1e-4
"""For so long the thread may keep the event loop waiting. Python's own setting is 50 times that."""


class AnswerThread:
    """The event loop interrupts its work whenever a token comes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "answers")
        self._running: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setswitchinterval(self._interval)
        self._thread.shutdown(cancel_futures=True)

    async def complete(self, answer: Answer, then: Callable[[], None], *, wait: bool) -> None:
        """Completes an answer and calls `then` on the event loop: before it returns, if it is to `wait`. Cancellation
        does not stop it."""
        if answer.rest is None or answer.reads < _LONG_READS:
            answer.complete()
            then()
            return
        task = asyncio.create_task(self._work(answer, then))
        self._running.add(task)
        task.add_done_callback(self._ended)
        if wait or len(self._running) > _BACKLOG:
            await asyncio.wait((task,))

    async def _work(self, answer: Answer, then: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, answer.complete)
        then()

    async def finish(self) -> None:
        """Until nothing is left. Raises what taking apart raised."""
        if self._running:
            await asyncio.wait(self._running)
        if self._error is not None:
            raise self._error

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._error = self._error or (None if task.cancelled() else task.exception())


_AGAIN_SECONDS = 0.1
"""A place of a closed loop whose request failed is taken again so long after it was sent, not before: a server that is
gone, or refuses, would be asked ten thousand times a second, which nobody's clients do, each time with a sample."""


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

    def __init__(self, client: Client, load: Load, started: float, on_sample: Callable[[Sample], None]) -> None:
        """`on_sample` gets each request's sample when it has ended, was cut off, or failed."""
        self.in_flight = 0
        self.held_up = False
        """Open loop: a session that was due had to wait for a place among `max_in_flight`."""
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

    async def run(self, sessions: Iterator[Session]) -> None:
        """Returns when everything has ended, or was cut off. Raises LoadTestError where the workload or the client
        does."""
        self._timer = PreciseTimer()
        try:
            with AnswerThread() as self._answer_thread:
                await self._run(sessions)
                await self._answer_thread.finish()
        finally:
            self._timer.close()

    async def _run(self, sessions: Iterator[Session]) -> None:
        await self._nap(self._started)
        limit = asyncio.create_task(self._end_at(self._load.seconds))
        work = self._work = asyncio.create_task(self._drive(sessions))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait((work,), timeout=self._load.grace)
        for task in (work, limit, stopped):
            task.cancel()
        error = (await asyncio.gather(work, limit, stopped, return_exceptions=True))[0]
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, Exception):
            raise error

    async def _end_at(self, seconds: float | None) -> None:
        if seconds is not None:
            await asyncio.sleep(self._started + seconds - perf_counter())
            self.stop()

    async def _nap(self, until: float) -> bool:
        """Waits for a time of time.perf_counter; False when the run is stopped meanwhile."""
        if until > perf_counter() and not self._stop.is_set():
            nap = asyncio.get_running_loop().create_future()
            self._timer.call_at(until, partial(_wake, nap))
            self._naps.add(nap)
            try:
                await asyncio.wait((nap,))
            finally:
                self._naps.discard(nap)
        return not self._stop.is_set()

    async def _drive(self, sessions: Iterator[Session]) -> None:
        first = next(sessions, None)
        if first is None:
            return
        source = chain((first,), sessions)
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
            began = perf_counter()
            if await self._session(session, began):
                await self._nap(began + _AGAIN_SECONDS)

    async def _open_loop(self, source: Iterator[Session], group: asyncio.TaskGroup) -> None:
        places = asyncio.Semaphore(self._load.max_in_flight)
        for session in source:
            due = self._started + (session.at or 0.0)
            if not await self._nap(due):
                return
            self.held_up |= places.locked()
            await places.acquire()
            await asyncio.sleep(0)  # one that is behind its times lets answers come in between
            if self._stop.is_set():
                return
            group.create_task(self._session(session, due)).add_done_callback(lambda _: places.release())

    async def _session(self, session: Session, due: float) -> str:
        """Sends its calls in order; one that fails ends it, since what follows needs the answer. Returns the failure's
        kind, or an empty text."""
        history: list[dict[str, Any]] = []
        for number, call in enumerate(session.calls, 1):
            if number > 1:
                if not await self._nap(due):
                    break
                history += _messages(call)
                # with answers in it, nobody has counted this prompt but the server
                call = msgspec.structs.replace(call, prompt=history, prompt_tokens=None, asked_prompt_tokens=None)
            elif len(session.calls) > 1:
                history = _messages(call)
            last = number == len(session.calls)
            answer = await self._call(call, due, last=last)
            if answer.error or last:
                return answer.error
            history.append({"role": "assistant", "content": answer.text or ""})
            due = answer.ended + session.calls[number].delay
        return ""

    async def _call(self, call: Call, due: float, *, last: bool) -> Answer:
        """The session's last answer may be incomplete yet: its place is free when it has come."""
        began = perf_counter()
        self.in_flight += 1
        try:
            answer = await self._client.send(call)
        except asyncio.CancelledError:
            self._note(call, due, Answer(sent=began, ended=perf_counter(), error=INTERRUPTED))
            raise
        finally:
            self.in_flight -= 1
        await self._answer_thread.complete(answer, partial(self._note, call, due, answer), wait=not last)
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
            asked_prompt_tokens=call.asked_prompt_tokens,
            wanted_output_tokens=call.output_tokens,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            error=answer.error,
            detail=answer.detail,
        )
        self._on_sample(sample)


def _wake(nap: asyncio.Future[None]) -> None:
    if not nap.done():
        nap.set_result(None)


def _messages(call: Call) -> list[dict[str, Any]]:
    """What the call adds to its session."""
    if isinstance(call.prompt, str):
        return [{"role": "user", "content": call.prompt}]
    return [message for message in call.prompt if isinstance(message, dict)]
