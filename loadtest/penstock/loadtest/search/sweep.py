"""A run for each value of a setting, and what the values together say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import LoadOptions, Options, SearchOptions, Target, WorkloadOptions
from penstock.loadtest.report.describe import title
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.model import Point, SweepReport
from penstock.loadtest.search.runs import BY_USER, Runner, merge, of_round

SWEPT = {
    "concurrency": LoadOptions,
    "rate": LoadOptions,
    "batch_size": Target,
    "prompt_tokens": WorkloadOptions,
    "output_tokens": WorkloadOptions,
}
"""What a sweep can change, and where it stands."""
DEFAULT_SECONDS = 30.0
"""Length of a run in a row of runs, where nothing else is said."""
_MOST_VALUES = 1000


class Sweep(NamedTuple):
    name: str
    """Of the setting."""
    values: list[float]


def parse_sweep(text: str) -> Sweep:
    """`rate=1,2,5`, `concurrency=1:64:x2` (1, 2, 4 ... 64), `concurrency=4:12:+4` (4, 8, 12), or several of these with
    commas between. Raises LoadTestError."""
    name, equals, listed = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in SWEPT:
        raise LoadTestError(f"sweep: {text!r} is not NAME=VALUES, as concurrency=1,4,16 (names: {', '.join(SWEPT)})")
    values = list(dict.fromkeys(value for part in listed.split(",") for value in _values(part.strip())))
    if len(values) > _MOST_VALUES:
        raise LoadTestError(f"sweep: {len(values)} values, at most {_MOST_VALUES} are run")
    for value in values:
        if value <= 0 or (name != "rate" and value != int(value)):
            kind = "a number above 0" if name == "rate" else "a whole number from 1 on"
            raise LoadTestError(f"sweep: {value:g} cannot be: {name} is {kind}")
    return Sweep(name, values)


def _values(part: str) -> list[float]:
    bounds = part.split(":")
    if len(bounds) == 1:
        return [_number(part)]
    if len(bounds) != 3 or bounds[2][:1] not in ("x", "+"):
        raise LoadTestError(f"sweep: {part!r} is neither a value nor FROM:TO:STEP, with a step as x2 or +4")
    first, last, step = _number(bounds[0]), _number(bounds[1]), _number(bounds[2][1:])
    times = bounds[2].startswith("x")
    if first <= 0 or last < first or step <= (1 if times else 0):
        raise LoadTestError(f"sweep: {part!r} never gets from {first:g} to {last:g}")
    count = math.log(last / first) / math.log(step) if times else (last - first) / step
    if count > _MOST_VALUES:
        raise LoadTestError(f"sweep: {part!r} has more than {_MOST_VALUES} values")
    steps = range(math.floor(count + 1e-9) + 1)
    return [round(first * step**index if times else first + step * index, 9) for index in steps]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise LoadTestError(f"sweep: {text!r} is not a number")
    return value


def check_load(options: Options, name: str, what: str) -> None:
    """Raises LoadTestError when a setting cannot be varied, since another one has taken its place."""
    if options.workload.trace is not None and name != "batch_size":
        raise LoadTestError(f"{what}: a trace brings its own times and lengths; {name} would change nothing")
    if name == "concurrency" and options.load.rate is not None:
        raise LoadTestError(f"{what}: with --rate requests are sent at given times; concurrency would change nothing")
    if name.endswith("_tokens") and (options.workload.dataset is not None or options.workload.mix):
        raise LoadTestError(f"{what}: {name} is of synthetic prompts; a dataset or a mix brings its own")


def one_of_a_row(options: Options) -> Options:
    """The settings that all runs of a row share: nothing of the row itself, and an end."""
    load = options.load
    if options.workload.requests is None and load.duration is None and options.workload.dataset is None:
        load = replace(load, duration=DEFAULT_SECONDS)
    return replace(options, load=load, search=SearchOptions())


def at(options: Options, name: str, value: float) -> Options:
    """With this value of a swept setting."""
    chosen: Any = value if name == "rate" else round(value)
    section = SWEPT[name]
    for field in ("target", "workload", "load"):
        settings = getattr(options, field)
        if isinstance(settings, section):
            options = replace(options, **{field: replace(settings, **{name: chosen})})
    return options


LOADS = ("concurrency", "rate")
"""Sweeps of these have a knee."""


def run_sweep(options: Options, run: Runner) -> SweepReport:
    """Repeats are interleaved: all values once, then all again, so that what drifts (heat, caches, neighbours) touches
    all alike. Ended early, or by a server that is gone, there is a report of the values that have been run; raises
    LoadTestError or KeyboardInterrupt when none has."""
    sweep = parse_sweep(options.search.sweep or "")
    check_load(options, sweep.name, "sweep")
    _check_places(sweep, options.workload.requests)
    shared = one_of_a_row(options)
    by_value: dict[float, list[Report]] = {value: [] for value in sweep.values}
    ended = ""
    try:
        _run_all(shared, sweep, run, by_value)
    except (KeyboardInterrupt, LoadTestError) as error:
        if not any(by_value.values()):
            raise
        ended = str(error) or BY_USER
    points = [
        Point(value=value, report=_named(merge(reports, at(shared, sweep.name, value)), sweep.name, value))
        for value, reports in by_value.items()
        if reports
    ]
    first = points[0].report
    return SweepReport(
        date=first.date,
        command=first.command,
        swept=sweep.name,
        points=points,
        peak=peak(points),
        knee=knee(points) if sweep.name in LOADS else None,
        notes=_notes(points, sweep),
        ended_early=ended,
    )


def _run_all(options: Options, sweep: Sweep, run: Runner, reports: dict[float, list[Report]]) -> None:
    repeats = options.load.repeat
    total = repeats * len(sweep.values)
    for number in range(repeats):
        for place, value in enumerate(sweep.values):
            text = f"run {number * len(sweep.values) + place + 1} of {total}: {sweep.name} {value:g}"
            # prompts of its own for each run: those of the value before would come from the server's prefix cache
            alone = of_round(at(options, sweep.name, value), number * len(sweep.values) + place)
            reports[value].append(run(alone, text).report)


def _check_places(sweep: Sweep, requests: int | None) -> None:
    """Raises LoadTestError for places that would never all be taken: the run would be one of fewer."""
    if sweep.name == "concurrency" and requests is not None and requests < max(sweep.values):
        raise LoadTestError(
            f"sweep: {requests} requests are never {max(sweep.values):g} at a time; --duration, or more --requests"
        )


def _named(report: Report, name: str, value: float) -> Report:
    """Loads tell themselves apart; of other settings reports show the value in their title."""
    return report if name in LOADS else replace(report, label=f"{title(report)}, {name} {value:g}")


def throughput(report: Report) -> float:
    """Output tokens per second; of answers without tokens, requests per second."""
    return report.output_tokens_per_s or report.requests_per_s


def peak(points: Sequence[Point]) -> float | None:
    """The value of the highest throughput; invalid runs are left out."""
    usable = [point for point in points if point.report.validity.verdict != "invalid"]
    return max(usable, key=lambda point: throughput(point.report)).value if usable else None


def knee(points: Sequence[Point]) -> float | None:
    """The load with the highest ratio of throughput to median end-to-end latency.

    This is Kleinrock's power (L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in
    computer communications", ICC 1979): below the knee more load raises throughput by a larger factor than latency,
    above it latency by a larger one. None when the highest load still has the most power: the knee lies beyond.
    """
    usable = sorted((p for p in points if p.report.validity.verdict != "invalid"), key=lambda point: point.value)
    powers = [
        throughput(point.report) / point.report.e2e_ms.p50 if point.report.e2e_ms and point.report.e2e_ms.p50 else 0.0
        for point in usable
    ]
    best = max(range(len(powers)), key=powers.__getitem__, default=-1)
    return usable[best].value if 0 <= best < len(powers) - 1 else None


def _notes(points: Sequence[Point], sweep: Sweep) -> list[str]:
    """Among them why runs are not to be trusted, and which ones."""
    reasons: dict[str, list[str]] = {}
    for point in points:
        for reason in point.report.validity.reasons:
            reasons.setdefault(f"{point.report.validity.verdict}: {reason}", []).append(f"{point.value:g}")
    notes = [f"{sweep.name} {', '.join(values)}: {reason}" for reason, values in reasons.items()]
    if len(points) > 2 and sweep.name in LOADS and knee(points) is None:
        notes.append("the knee lies beyond the highest load: latency has not taken off yet")
    return notes
