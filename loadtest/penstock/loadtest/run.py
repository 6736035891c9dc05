"""A load test from settings to report: the repeats, one after the other, and what they come to."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from penstock.loadtest.clients.discover import only_model
from penstock.loadtest.environment import busy_cpu_seconds, environment
from penstock.loadtest.fleet import Fleet, RunResult
from penstock.loadtest.goodput import parse_objectives
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Figures, summarize
from penstock.loadtest.options import Options
from penstock.loadtest.repeats import intervals, medians
from penstock.loadtest.report.model import Report
from penstock.loadtest.timeline import timeline
from penstock.loadtest.validity import judge

_PLACES_PER_PROCESS = 256
"""Of a closed loop: more streams than that are shared out among processes."""
_RATE_PER_PROCESS = 500.0
"""Of an open loop, requests per second."""


class View(Protocol):
    """Who looks on."""

    def update(self, samples: Sequence[Sample], in_flight: int) -> None: ...
    def note(self, text: str) -> None: ...


class LoadTest:
    """Runs `options.load.repeat` times; `interrupt` ends it early with a report of what there is."""

    def __init__(self, options: Options, view: View, argv: Sequence[str] = ()) -> None:
        self.samples: list[Sample] = []
        """Of the last run."""
        self.interrupted = False
        self._options = options
        self._view = view
        self._argv = argv
        self._fleet: Fleet | None = None

    def interrupt(self) -> None:
        """The first time nothing is begun any more, the second time what runs is cut off."""
        if self._fleet is not None:
            self._fleet.stop(now=self.interrupted)
        self.interrupted = True

    async def run(self) -> Report:
        """Raises LoadTestError when nothing can be measured."""
        options = self._options = await self._complete(self._options)
        objectives = parse_objectives(options.load.goodput)
        open_loop = options.load.rate is not None or options.workload.trace is not None
        date = datetime.now(UTC)
        busy = busy_cpu_seconds()
        results: list[RunResult] = []
        runs: list[Figures] = []
        for number in range(options.load.repeat):
            if self.interrupted:
                break
            if options.load.repeat > 1:
                self._view.note(f"run {number + 1} of {options.load.repeat}")
            results.append(await self._once(options, number))
            runs.append(summarize(results[-1].samples, open_loop=open_loop, objectives=objectives))
        last = results[-1]
        self.samples = last.samples
        figures = medians(runs)
        return Report(
            **figures,
            label=options.output.label or options.target.model,
            date=date.isoformat(timespec="seconds"),
            command=shlex.join(["penstock", *(self._argv or sys.argv[1:])]),
            options=options,
            validity=judge(
                [sample for result in results for sample in result.samples],
                [client for result in results for client in result.clients],
                msgspec.convert(figures, Figures, from_attributes=True),
                options,
            ),
            runs=runs,
            intervals=intervals(runs),
            timeline=timeline(last.samples),
            environment=environment() | _foreign(busy, results),
            interrupted_by_user=self.interrupted,
        )

    @staticmethod
    async def _complete(options: Options) -> Options:
        """With the model's name, where it was left to the server."""
        if options.target.model or not options.target.protocol.startswith("openai"):
            return options
        target = msgspec.structs.replace(options.target, model=await only_model(options.target))
        return msgspec.structs.replace(options, target=target)

    async def _once(self, options: Options, number: int) -> RunResult:
        fleet = self._fleet = Fleet(options, processes(options), options.workload.seed + number)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self.interrupt)
        try:
            return await fleet.run(lambda samples: self._view.update(samples, sum(fleet.in_flight)))
        finally:
            for name in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(name)


def processes(options: Options) -> int:
    """How many client processes a load gets."""
    load = options.load
    if load.processes:
        return min(load.processes, load.concurrency) if load.rate is None else load.processes
    if load.rate is not None:
        return max(1, round(load.rate / _RATE_PER_PROCESS))
    return -(-load.concurrency // _PLACES_PER_PROCESS)


def _foreign(busy: float | None, results: Sequence[RunResult]) -> dict[str, float]:
    """Cores that anything but the clients used: the server, if it is on this machine, and whatever else ran."""
    now, wall = busy_cpu_seconds(), sum(max((c.wall_seconds for c in r.clients), default=0.0) for r in results)
    if busy is None or now is None or not wall:
        return {}
    own = sum(client.cpu_seconds for result in results for client in result.clients)
    return {"other_cores": round(max(0.0, now - busy - own) / wall, 2)}
