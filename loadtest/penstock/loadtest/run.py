"""A load test from settings to report: the repeats, one after the other, and what they come to."""

from __future__ import annotations

import asyncio
import shlex
import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import inf
from statistics import median
from types import FrameType
from typing import Protocol

import msgspec

from penstock.loadtest.calibrate import Calibration, calibrate
from penstock.loadtest.clients.discover import only_model
from penstock.loadtest.environment import environment, is_local, usable_cores
from penstock.loadtest.errors import INTERRUPTED, LoadTestError
from penstock.loadtest.fleet import Fleet, RunResult
from penstock.loadtest.latency import Objective, parse_objectives
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Figures, summarize
from penstock.loadtest.options import Options, check_latencies
from penstock.loadtest.repeats import intervals, medians
from penstock.loadtest.report.model import Report, ServerWatch, Timeline
from penstock.loadtest.tokens import cached_own, token_counts
from penstock.loadtest.validity import judge
from penstock.loadtest.watch import Watch

_SLICES = 60
_STEPS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Lengths of a slice that people can read an axis by."""


def timeline(samples: Sequence[Sample]) -> Timeline | None:
    """At most about 60 slices; None for a run without samples."""
    end = max((sample.ended for sample in samples), default=0.0)
    if end <= 0:
        return None
    seconds = next((step for step in _STEPS if end / step <= _SLICES), _STEPS[-1])
    count = int(end / seconds) + 1
    tokens, done, errors, busy = [0.0] * count, [0.0] * count, [0] * count, [0.0] * count
    ttfts: list[list[float]] = [[] for _ in range(count)]

    def slot(time: float) -> int:
        return min(count - 1, max(0, int(time / seconds)))

    for sample in samples:
        for index in range(slot(sample.sent), slot(sample.ended) + 1):
            busy[index] += max(0.0, min(sample.ended, (index + 1) * seconds) - max(sample.sent, index * seconds))
        if sample.error:
            errors[slot(sample.ended)] += sample.error != INTERRUPTED
            continue
        arrivals = sample.arrivals or [sample.ended]
        for arrival in arrivals:
            tokens[slot(arrival)] += sample.tokens / len(arrivals)
        done[slot(sample.ended)] += 1
        if sample.arrivals:
            ttfts[slot(sample.sent)].append(sample.arrivals[0] - sample.sent)
    return Timeline(
        seconds=seconds,
        output_tokens_per_s=[round(value / seconds, 2) for value in tokens],
        requests_per_s=[round(value / seconds, 3) for value in done],
        in_flight=[round(value / seconds, 2) for value in busy],
        ttft_ms=[round(statistics.median(values) * 1e3, 3) if values else None for values in ttfts],
        errors=errors,
    )


_TOKENS_PER_STREAM = 200.0
"""Tokens per second that a stream of a closed loop is assumed to bring, before anything is known of the server."""
_CEILING = 100_000.0
"""Tokens per second of a client process, where it has not been measured."""
_USED = 0.5
"""Share of that which is counted on."""
_REQUESTS_PER_PROCESS = 1000.0
"""Open loop, each second."""


class View(Protocol):
    """Who looks on."""

    def update(self, samples: Sequence[Sample], in_flight: int) -> None: ...
    def note(self, text: str) -> None: ...


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One of the repeats."""

    result: RunResult
    figures: Figures
    server: ServerWatch | None
    other_cores: float | None
    clock_ms: float


class LoadTest:
    """Runs `options.load.repeat` times; `interrupt` ends it early with a report of what there is."""

    def __init__(
        self, options: Options, view: View, argv: Sequence[str] = (), calibration: Calibration | None = None
    ) -> None:
        """`calibration`: from another load test with the same target, else it is measured where options say so."""
        self.samples: list[Sample] = []
        """Of the last run."""
        self.calibration = calibration
        self._options = options
        self._view = view
        self._argv = argv
        self._fleet: Fleet | None = None
        self._interrupts = 0
        self._heard = False
        """A signal has come; the loop will interrupt."""
        self._task: asyncio.Task[Report] | None = None

    @property
    def interrupted(self) -> bool:
        return self._heard or self._interrupts > 0

    def interrupt(self) -> None:
        """The first time nothing is begun any more, the second time what runs is cut off, the third time the client
        processes are killed. Before the first run has begun: there is no report."""
        self._interrupts += 1
        if self._fleet is None:
            if self._task is not None:
                self._task.cancel()
        elif self._interrupts > 2:
            self._fleet.kill()
        else:
            self._fleet.stop(now=self._interrupts == 2)
            if self._interrupts == 1 and self._fleet.begun:
                self._view.note("waiting for what runs; once more cuts it off")

    def run_here(self) -> Report:
        """`run` in a loop of its own. Raises KeyboardInterrupt when the user has ended it before anything was
        measured."""
        try:
            return asyncio.run(self.run())
        except asyncio.CancelledError:  # Ctrl-C just before the loop's first step: Runner.run counts from there on only
            raise KeyboardInterrupt from None
        except LoadTestError:
            if self.interrupted:
                raise KeyboardInterrupt from None
            raise

    async def run(self) -> Report:
        """Raises LoadTestError when nothing can be measured, or nothing was until it was interrupted."""
        with self._signals():
            self._task = asyncio.create_task(self._run())
            try:
                return await self._task
            except asyncio.CancelledError:
                if not self.interrupted:
                    raise
                raise LoadTestError("stopped before anything was measured") from None
            finally:
                self._task.cancel()

    async def _run(self) -> Report:
        objectives = parse_objectives(self._options.load.goodput)
        check_latencies(self._options.target, [objective.name for objective in objectives], "goodput")
        options = self._options = await self._complete(self._options)
        date = datetime.now(UTC)
        if self.calibration is None and options.load.calibrate:
            self.calibration = await calibrate(options)
        runs: list[Run] = []
        number = processes(options, self.calibration)
        for repeat in range(options.load.repeat):
            if options.load.repeat > 1:
                self._view.note(f"run {repeat + 1} of {options.load.repeat}")
            try:
                run = await self._once(options, number, repeat, objectives)
            except LoadTestError:
                if self.interrupted and runs:
                    break
                raise
            if self.interrupted and runs:
                break  # a part of a run is no match for whole ones
            runs.append(run)
            if self.interrupted:
                break
        return self._report(options, runs, number, date)

    def _report(self, options: Options, runs: Sequence[Run], number: int, date: datetime) -> Report:
        last = runs[-1]
        self.samples = last.result.samples
        figures = medians([run.figures for run in runs])
        tokens = token_counts([sample for run in runs for sample in run.result.samples], options, last.server)
        foreign = [run.other_cores for run in runs if run.other_cores is not None]
        return Report(
            **figures,
            label=options.output.label or options.target.model,
            date=date.isoformat(timespec="seconds"),
            command=shlex.join(["penstock", *(self._argv or sys.argv[1:])]),
            options=options,
            validity=judge(
                [sample for run in runs for sample in run.result.samples],
                [client for run in runs for client in run.result.clients],
                msgspec.convert(figures, Figures, from_attributes=True),
                options,
                self.calibration,
                processes=number,
                lost=sum(run.result.lost for run in runs),
                other_cores=_foreign(options, runs),
                clock_ms=max((run.clock_ms for run in runs), key=abs),
                cached=cached_own(tokens, options),
                ended_early=self.interrupted,
            ),
            runs=[run.figures for run in runs],
            intervals=intervals([run.figures for run in runs]),
            tokens=tokens,
            timeline=timeline(self.samples),
            server=last.server,
            environment=environment() | ({"other_cores": median(foreign)} if foreign else {}),
            interrupted_by_user=self.interrupted,
        )

    @staticmethod
    async def _complete(options: Options) -> Options:
        """With the model's name, where it was left to the server."""
        if options.target.model:
            return options
        target = msgspec.structs.replace(options.target, model=await only_model(options.target))
        return msgspec.structs.replace(options, target=target)

    async def _once(self, options: Options, number: int, repeat: int, objectives: Sequence[Objective]) -> Run:
        fleet = self._fleet = Fleet(options, number, options.workload.seed + repeat)
        if self.interrupted:
            fleet.stop()
        async with fleet, Watch(options, fleet.pids) as watch:
            result = await fleet.run(lambda samples: self._view.update(samples, sum(fleet.in_flight)))
        return Run(
            result=result,
            figures=summarize(
                result.samples,
                open_loop=options.open_loop,
                objectives=objectives,
                lasts=inf if options.load.duration is None else options.load.duration,
            ),
            server=watch.result,
            other_cores=watch.other_cores(sum(client.cpu_seconds for client in result.clients)),
            clock_ms=watch.clock_ms,
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM interrupt, where this thread gets signals at all; handlers are then as they were.

        A loop's own handlers (`add_signal_handler`) run with its next iteration. After the last one there is none, and
        what came while the report was made would be lost: here it is known at once.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def hear(number: int, frame: FrameType | None) -> None:
            self._heard = True
            loop.call_soon_threadsafe(self.interrupt)

        before = [(name, signal.signal(name, hear)) for name in (signal.SIGINT, signal.SIGTERM)]
        try:
            yield
        finally:
            for name, handler in before:
                signal.signal(name, handler)


def _foreign(options: Options, runs: Sequence[Run]) -> float | None:
    """The median; None where a server on this machine could not be told from others."""
    known = [run.other_cores for run in runs if run.other_cores is not None]
    is_known = not is_local(options.target.url) or all(run.server and run.server.cores is not None for run in runs)
    return median(known) if known and is_known else None


def processes(options: Options, calibration: Calibration | None) -> int:
    """How many client processes a load gets: those asked for, or as many as its tokens need, as long as there are
    cores for them; a server on the same machine needs some, too."""
    load = options.load
    most = load.max_in_flight if options.open_loop else load.concurrency
    if load.processes:
        return min(load.processes, most)
    ceiling = _USED * (calibration.tokens_per_s if calibration is not None and calibration.tokens_per_s else _CEILING)
    if load.rate is not None:
        needed = max(load.rate * options.workload.output_tokens / ceiling, load.rate / _REQUESTS_PER_PROCESS)
    else:
        needed = load.concurrency * _TOKENS_PER_STREAM / ceiling
    cores = usable_cores()
    room = max(1, cores // 2 if is_local(options.target.url) else cores)
    return min(max(1, -int(-needed // 1)), room, most)
