"""The highest rate or concurrency at which a server keeps its bounds, by running load tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Options
from penstock.loadtest.report.formatting import number, percent
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.model import FindReport, Probe
from penstock.loadtest.search.runs import BY_USER, Run, Runner, merge, of_round
from penstock.loadtest.search.slo import bounds_of, margins, miss
from penstock.loadtest.search.sweep import DEFAULT_SECONDS, at, check_load, one_of_a_row

# The highest load that holds, by trying: doubling until something fails, then halving the interval (on a logarithmic
# scale). What a single try says is not taken for the truth: near the bound there are more of them, and the answer is
# checked from both sides.

_BEST_OF = 3
_ABOVE = 1.25
"""How far above a failure a look is taken: does everything fail there?"""
_DIGITS = 3
"""Of values that are tried, so that people can write them."""


class Trial(NamedTuple):
    held: bool
    close: bool = False
    """Another run might say the other thing: it is decided by the best of three."""
    invalid: str = ""
    """Why it says nothing; ends the search."""


class HighestLoad(NamedTuple):
    """Between what held and what failed."""

    held: float | None
    """The highest value that held, below all that failed."""
    failed: float | None
    """The lowest one that failed."""
    outcome: str
    """As in `FindReport`."""
    notes: list[str]


class _Over(Exception):
    """Nothing more can be tried; the text is the outcome."""


class HighestLoadSearch:
    """`interval` is what is known at any time."""

    def __init__(
        self,
        attempt: Callable[[float], Trial],
        *,
        start: float,
        least: float,
        whole: bool,
        precision: float,
        max_runs: int,
        tries: int = 1,
    ) -> None:
        """`least`: the value below which nothing is tried. `whole`: values are whole numbers. `precision`: the
        search ends when what held and what failed are as near as this share. `tries`: runs of each value, at least."""
        self._attempt = attempt
        self._start = max(start, least)
        self._least = least
        self._whole = whole
        self._precision = precision
        self._runs_left = max_runs
        self._tries = tries
        self._trials: dict[float, list[Trial]] = {}
        self._sure: set[float] = set()
        """Values that were tried once more, by themselves."""
        self._notes: list[str] = []

    def run(self) -> HighestLoad:
        try:
            outcome = self._search()
        except _Over as over:
            outcome = "found" if str(over) == "client-bound" and self._near_enough() else str(over)
        return self.result(outcome)

    def result(self, outcome: str) -> HighestLoad:
        held, failed = self.interval()
        beyond = [value for value in self._trials if failed is not None and value > failed and self._held(value)]
        if beyond:
            values = ", ".join(f"{value:g}" for value in sorted(beyond))
            self._notes.append(f"not monotone: {values} held, though {failed:g} failed; the answer is the lower one")
        return HighestLoad(held, failed, outcome, self._notes)

    def interval(self) -> tuple[float | None, float | None]:
        """The highest value that held below the lowest one that failed."""
        failed = min((value for value in self._trials if not self._held(value)), default=None)
        held = [value for value in self._trials if self._held(value) and (failed is None or value < failed)]
        return max(held, default=None), failed

    def _search(self) -> str:
        while True:
            held, failed = self.interval()
            if failed is None:
                self._try(self._start if held is None else self._readable(2 * held))
            elif held is None:
                if failed <= self._least:
                    return "nothing held"
                self._try(max(self._least, self._readable(failed / 2)))
            elif (middle := self._middle(held, failed)) is not None:
                self._try(middle)
            elif self._checked(held, failed):
                return "found"

    def _checked(self, held: float, failed: float) -> bool:
        """Whether both ends stand. The lower one is tried again; if even more than the upper one holds, that is too."""
        if held not in self._sure:
            self._sure.add(held)
            self._once_more(held)
            return False
        above = self._readable(max(_ABOVE * failed, failed + self._whole))
        if above not in self._trials:
            self._try(above)
            return False
        if self._held(above) and failed not in self._sure:
            self._sure.add(failed)
            self._once_more(failed)
            return False
        return True

    def _near_enough(self) -> bool:
        held, failed = self.interval()
        return held is not None and failed is not None and self._middle(held, failed) is None

    def _middle(self, held: float, failed: float) -> float | None:
        """None: they are as near as was asked for."""
        if failed <= held * (1 + self._precision) or (self._whole and failed - held <= 1):
            return None
        middle = self._readable(math.sqrt(held * failed))
        return middle if held < middle < failed else None

    def _readable(self, value: float) -> float:
        if self._whole:
            return float(max(1, round(value)))
        return round(value, _DIGITS - 1 - math.floor(math.log10(value)))

    def _try(self, value: float) -> None:
        """Until it is decided: at once, or if it was a close thing by the best of three."""
        while len(trials := self._trials.get(value, [])) < self._tries or (
            any(trial.close for trial in trials) and not _settled(trials)
        ):
            self._run(value)

    def _once_more(self, value: float) -> None:
        self._run(value)
        if not _settled(self._trials[value]):
            self._run(value)

    def _run(self, value: float) -> None:
        if not self._runs_left:
            raise _Over("unfinished")
        self._runs_left -= 1
        trial = self._attempt(value)
        if trial.invalid:
            self._notes.append(f"{value:g}: {trial.invalid}")
            raise _Over("client-bound")
        self._trials.setdefault(value, []).append(trial)

    def _held(self, value: float) -> bool:
        """By most of its trials; a tie is a failure."""
        trials = self._trials[value]
        return 2 * sum(trial.held for trial in trials) > len(trials)


def _settled(trials: list[Trial]) -> bool:
    """Whether one side has what wins the best of three, and leads."""
    held = sum(trial.held for trial in trials)
    failed = len(trials) - held
    return held != failed and max(held, failed) > _BEST_OF // 2


KEEPS_UP = 0.95
"""A server is saturated when it completes requests at less than this share of the rate at which they come."""
_FEWEST_REQUESTS = 10
"""In a run, by its rate and length: at lower rates nothing is tried."""
_LENGTHS, _LONG_ENOUGH = 10, 5
"""A run lasts so many times the median latency of the first one, unless its length is given; shorter than the second
number, a run is hardly ever in a steady state."""
_LONGEST = 600.0
_NEAR, _NEARLY_KEPT_UP = 0.1, 0.04
"""So near to a bound (of measured / allowed), and to the share at which a server keeps up, a run is a close thing."""


def run_find(options: Options, run: Runner) -> FindReport:
    """Ended early, or by a server that is gone, there is a report of what has been tried; raises LoadTestError or
    KeyboardInterrupt when nothing has."""
    finder = _Finder(options, run)
    ended = ""
    try:
        highest = finder.search.run()
    except (KeyboardInterrupt, LoadTestError) as error:
        if not finder.tried:
            raise
        ended = str(error) or BY_USER
        highest = finder.search.result("unfinished")
    return finder.report(highest, ended)


class _Finder:
    """Runs what the search wants to know, and keeps it."""

    def __init__(self, options: Options, run: Runner) -> None:
        _check(options)
        settings = options.search
        self._what = settings.find or ""
        self._run = run
        self._bounds = bounds_of(settings.slo, options)
        self._options = one_of_a_row(replace(options, load=replace(options.load, rate=None)))
        self._seconds = options.load.duration or DEFAULT_SECONDS
        self._may_grow = options.load.duration is None
        self._max_runs = settings.max_runs
        self._notes: list[str] = []
        self._begun = 0
        self.tried: list[tuple[float, Probe, Report]] = []
        whole = self._what == "concurrency"
        self.search = HighestLoadSearch(
            self._trial,
            start=options.load.concurrency if whole else options.load.rate or 1.0,
            least=1.0 if whole else _FEWEST_REQUESTS / self._seconds,
            whole=whole,
            precision=settings.precision,
            max_runs=settings.max_runs,
            tries=options.load.repeat,
        )

    def _trial(self, value: float) -> Trial:
        run = self._once(value)
        if self._may_grow:
            self._may_grow = False
            if self._grown(run.report):
                run = self._once(value)
        probe = self._judge(value, run)
        self.tried.append((value, probe, run.report))
        return Trial(probe.held, self._close(probe), probe.invalid)

    def _once(self, value: float) -> Run:
        load = replace(self._options.load, duration=self._seconds)
        options = at(replace(self._options, load=load), self._what, value)
        text = f"run {len(self.tried) + 1} of at most {self._max_runs}: {self._what} {value:g}"
        self._begun += 1  # the first may be run again, longer: not with prompts that the server knows by then
        return self._run(of_round(options, self._begun - 1), text)

    def _grown(self, first: Report) -> bool:
        """Whether runs have to be longer than thought."""
        seconds = min(_LONGEST, _LENGTHS * first.e2e_ms.p50 / 1e3) if first.e2e_ms else 0.0
        if seconds <= self._seconds:
            return False
        self._seconds = float(round(seconds))
        self._notes.append(f"requests take long: each run lasts {self._seconds:g} s")
        return True

    def _judge(self, value: float, run: Run) -> Probe:
        report = run.report
        if not report.completed and not self.tried:
            said = "; ".join(f"{kind}: {detail}" for kind, detail in report.error_details.items())
            raise LoadTestError(f"no request was completed at {self._what} {value:g}: {said or 'none was answered'}")
        bound_margins = margins(report, self._bounds)
        misses = [miss(report, bound) for bound, reached in bound_margins.items() if reached > 1]
        nearest = max(bound_margins.values())
        if self._what == "rate":
            nearest = max(nearest, (1 - run.kept_up) / (1 - KEEPS_UP))
            if run.kept_up < KEEPS_UP:
                misses.append(f"completed {percent(run.kept_up)} of the rate of arrivals")
        invalid = report.validity.verdict == "invalid" and report.completed
        return Probe(
            value=value,
            held=not misses,
            margin=nearest,
            misses=misses,
            kept_up=run.kept_up,
            invalid="; ".join(report.validity.reasons) if invalid else "",
        )

    def _close(self, probe: Probe) -> bool:
        keeping_up = self._what == "rate" and abs(probe.kept_up - KEEPS_UP) < _NEARLY_KEPT_UP
        return keeping_up or abs(probe.margin - 1) < _NEAR

    def report(self, highest: HighestLoad, ended: str) -> FindReport:
        first = self.tried[0][2]
        return FindReport(
            date=first.date,
            command=first.command,
            searched=self._what,
            bounds=self._bound_texts(),
            held=highest.held,
            failed=highest.failed,
            outcome=highest.outcome,
            probes=[probe for _, probe, _ in self.tried],
            reports=self._merged(),
            notes=[*self._notes, *self._short(), *highest.notes],
            ended_early=ended,
        )

    def _bound_texts(self) -> list[str]:
        texts = [str(bound) for bound in self._bounds]
        return [*texts, f"completed ≥ {percent(KEEPS_UP)} of the rate of arrivals"] if self._what == "rate" else texts

    def _merged(self) -> list[Report]:
        by_value: dict[float, list[Report]] = {}
        for value, _, report in sorted(self.tried, key=lambda tried: tried[0]):
            by_value.setdefault(value, []).append(report)
        return [merge(reports, at(reports[0].options, self._what, value)) for value, reports in by_value.items()]

    def _short(self) -> Sequence[str]:
        held = [report for _, probe, report in self.tried if probe.held and report.e2e_ms]
        longest = max((report.e2e_ms.p50 / 1e3 for report in held if report.e2e_ms), default=0.0)
        if longest * _LONG_ENOUGH <= self._seconds:
            return []
        return [f"runs of {self._seconds:g} s are short beside requests of {number(longest)} s: raise --duration"]


def _check(options: Options) -> None:
    """Raises LoadTestError for what cannot be searched."""
    what, load = options.search.find or "", options.load
    check_load(options if what == "concurrency" else replace(options, load=replace(load, rate=None)), what, "find")
    if options.workload.requests is not None:
        raise LoadTestError("find: its runs have a length, not a number of requests: --duration instead of --requests")
    if what == "concurrency" and not options.search.slo:
        raise LoadTestError(
            "find: a closed loop waits for the server, and so never is too much for it: give bounds with --slo (the "
            "knee of --sweep concurrency=... may be what you want)"
        )
    if what == "rate" and not options.search.slo and options.workload.turns > 1:
        raise LoadTestError("find: turns after the first wait for the server; give bounds with --slo")
