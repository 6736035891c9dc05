"""A server that is computed: a few places, a fixed time for each request, first come, first served."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.loadtest.latency import parse_objectives
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import summarize
from penstock.loadtest.options import Options, options
from penstock.loadtest.repeats import intervals, medians
from penstock.loadtest.report.model import Report, Validity
from penstock.loadtest.search.runs import Run, kept_up

URL = "http://server:8000"


def chosen(**settings: object) -> Options:
    return options({"url": URL, "model": "m", **settings})


@dataclass
class ComputedServer:
    """A runner of load tests. Its capacity is `places / seconds` requests per second."""

    places: int = 4
    seconds: float = 0.2
    client_rate: float = 1e9
    """Requests per second that the client can send; above it runs are invalid."""
    spoil: Callable[[int], BaseException | None] = lambda number: None
    """What a run ends with instead, by its number."""
    told: list[str] = field(default_factory=list)
    ran: list[Options] = field(default_factory=list)

    @property
    def capacity(self) -> float:
        return self.places / self.seconds

    def __call__(self, settings: Options, text: str) -> Run:
        self.told.append(text)
        self.ran.append(settings)
        if (error := self.spoil(len(self.ran) - 1)) is not None:
            raise error
        samples = self._samples(settings)
        bound = (settings.load.rate or 0.0) > self.client_rate
        return Run(report_of(settings, samples, "invalid" if bound else "valid"), kept_up(samples))

    def _samples(self, settings: Options) -> list[Sample]:
        load = settings.load
        duration = load.duration or 30.0
        free = [0.0] * self.places
        due = [0.0] * load.concurrency
        if load.rate is not None:
            due = [index / load.rate for index in range(int(duration * load.rate))]
        samples = []
        while due:
            intended = heapq.heappop(due)
            begun = max(intended, heapq.heappop(free))
            ended = begun + self.seconds
            heapq.heappush(free, ended)
            samples.append(answered(len(samples), intended, begun, ended))
            if load.rate is None and ended < duration:
                heapq.heappush(due, ended)
        return samples


def answered(index: int, intended: float, begun: float, ended: float) -> Sample:
    """Ten tokens; the first after a tenth of the time that the request is served."""
    step = (ended - begun) / 10
    arrivals = [begun + step * (token + 1) for token in range(10)]
    return Sample(index=index, intended=intended, sent=intended, arrivals=arrivals, ended=ended, output_tokens=10)


def report_of(settings: Options, samples: list[Sample], verdict: str = "valid") -> Report:
    open_loop = settings.load.rate is not None
    figures = summarize(samples, open_loop=open_loop, objectives=parse_objectives(settings.load.goodput))
    return Report(
        **medians([figures]),
        label=settings.output.label or settings.target.model,
        date="2026-11-20T12:00:00+00:00",
        command="penstock loadtest",
        options=settings,
        validity=Validity(verdict=verdict, reasons=["the client was late"] if verdict != "valid" else []),
        runs=[figures],
        intervals=intervals([figures]),
    )
