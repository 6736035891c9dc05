"""Starts a server for each combination, measures it, stops it, and keeps what did best."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Options
from penstock.loadtest.report.formatting import clean
from penstock.loadtest.report.model import Interval, Report
from penstock.loadtest.search.runs import BY_USER, Runner
from penstock.loadtest.search.slo import bounds_of
from penstock.loadtest.tune.findings import Tried, TuneReport
from penstock.loadtest.tune.objective import NOTHING, Judgement, judge, parse_objective
from penstock.loadtest.tune.options import TuneOptions
from penstock.loadtest.tune.params import STRATEGIES, Combination, Score, config_lines, flags, of_models, parse_params
from penstock.loadtest.tune.server import NotReadyError, configure_model, running


class Base(NamedTuple):
    """What is started, without what is varied."""

    command: list[str]
    """As it is run."""
    as_given: list[str]
    """As people write it, without the ports chosen here."""
    url: str
    """Of its HTTP port."""


class Tuner:
    """`run` tries all that the strategy wants to know."""

    def __init__(self, tune: TuneOptions, options: Options, base: Base, run: Runner) -> None:
        self._params = parse_params(tune.param)
        self._objective = parse_objective(tune.objective, options)
        self._bounds = bounds_of(tune.slo, options)
        self._tune = tune
        self._options = options
        self._base = base
        self._run = run
        self._tried: list[Tried] = []
        self._judged: list[Judgement] = []

    def run(self) -> TuneReport:
        """Ended early there is a report of what has been tried; raises LoadTestError when no server could be measured,
        KeyboardInterrupt when nothing was tried."""
        ended = ""
        try:
            STRATEGIES[self._tune.strategy](self._params, self._evaluate)
        except KeyboardInterrupt:
            if not self._tried:
                raise
            ended = BY_USER
        reports = [tried.report for tried in self._tried if tried.report is not None]
        if not reports:
            raise LoadTestError(f"no server could be measured: {self._tried[0].problem}")
        return self._report(reports[0], ended)

    def _evaluate(self, combination: Combination) -> Score:
        name = ", ".join(f"{name}={value}" for name, value in combination.items())
        report, judged, problem = None, Judgement(NOTHING, []), ""
        try:
            report = self._measure(combination, name)
            judged = judge(report, self._objective, self._bounds)
        except NotReadyError as error:
            problem = str(error)
        except LoadTestError as error:
            if not self._tried:  # it is the first: most likely no other will do
                raise
            problem = str(error)
        if problem:
            print(f"{name}: {clean(problem)}", file=sys.stderr)
        figure = None if report is None else self._objective.of(report)
        self._judged.append(judged)
        self._tried.append(
            Tried(settings=dict(combination), objective=figure, misses=judged.misses, problem=problem, report=report)
        )
        return judged.score

    def _measure(self, combination: Combination, name: str) -> Report:
        tune, key = self._tune, self._options.target.api_key
        server = running(
            [*self._base.command, *flags(combination)],
            self._base.url + tune.ready,
            start_timeout=tune.start_timeout,
            stop_timeout=tune.stop_timeout,
        )
        with server:
            for model, fields in of_models(combination).items():
                configure_model(self._base.url, model, fields, key)
            output = replace(self._options.output, label=name)
            return self._run(replace(self._options, output=output), f"server {len(self._tried) + 1}: {name}").report

    def _report(self, first: Report, ended: str) -> TuneReport:
        best = max(range(len(self._judged)), key=lambda index: self._judged[index].score)
        if self._judged[best].score[:2] != (1.0, 1.0):  # not to be used, or bounds are broken
            return self._whole(first, ended, None, [], {})
        alike = [
            index
            for index, judged in enumerate(self._judged)
            if index != best and judged.score[:2] == (1.0, 1.0) and self._touch(index, best)
        ]
        return self._whole(first, ended, best, alike, self._tried[best].settings)

    def _whole(
        self, first: Report, ended: str, best: int | None, alike: Sequence[int], settings: Mapping[str, str]
    ) -> TuneReport:
        return TuneReport(
            date=first.date,
            command=first.command,
            objective=self._objective.title,
            more_is_better=self._objective.more_is_better,
            bounds=[str(bound) for bound in self._bounds],
            tried=self._tried,
            best=best,
            like_best=list(alike),
            best_command="" if best is None else shlex.join([*self._base.as_given, *flags(settings)]),
            best_config={model: config_lines(fields) for model, fields in of_models(settings).items()},
            ended_early=ended,
        )

    def _touch(self, one: int, other: int) -> bool:
        a, b = self._interval(one), self._interval(other)
        return a is not None and b is not None and a.low <= b.high and b.low <= a.high

    def _interval(self, index: int) -> Interval | None:
        report = self._tried[index].report
        return None if report is None else report.intervals.get(self._objective.path)
