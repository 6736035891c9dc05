"""Rows of runs as text: the answer in sentences, and the tables below it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from penstock.loadtest.report.describe import title
from penstock.loadtest.report.figures import COMPARED, GOODPUT, LATENCIES, RATES, value
from penstock.loadtest.report.markdown import code, escape, table
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.words import number, percent
from penstock.loadtest.search.model import FindReport, Study, SweepReport, VersusReport
from penstock.loadtest.search.versus import SAME

TITLES = {figure.path: f"{figure.title} {figure.unit}".strip() for figure in COMPARED}
_KEY_FIGURES = ("output_tokens_per_s", "requests_per_s", "ttft_ms.p50", "ttft_ms.p99", "e2e_ms.p99")
_UNITS = {"rate": "requests per second", "concurrency": "requests at a time"}
Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows of a table."""


@singledispatch
def answer(study: Study) -> list[str]:
    """What it has shown, in sentences."""
    raise TypeError(study)


@answer.register
def _(study: SweepReport) -> list[str]:
    said = []
    if study.knee is not None:
        said.append(
            f"The knee is at {study.swept} {study.knee:g}: there the ratio of throughput to median latency is highest; "
            "more load beyond it raises latency by a larger factor than throughput."
        )
    if study.peak is not None:
        said.append(f"Throughput is highest at {study.swept} {study.peak:g}.")
    return [*said, *_shared(study)]


@answer.register
def _(study: FindReport) -> list[str]:
    unit, bounds = _UNITS[study.searched], "; ".join(study.bounds)
    if study.held is None:
        what = "Nothing that was tried held" + (f": {study.failed:g} {unit} failed." if study.failed else ".")
    elif study.failed is None:
        what = f"{study.held:g} {unit} held; nothing that was tried failed."
    else:
        what = f"The highest load that holds lies between {study.held:g} and {study.failed:g} {unit}: the first held, "
        what += "the second failed."
    ends = {
        "client-bound": "The search ended since the client, not the server, was at its end.",
        "unfinished": "The search did not come to its end.",
    }
    return [what, *filter(None, [ends.get(study.outcome)]), f"Bounds: {bounds}.", *_shared(study)]


@answer.register
def _(study: VersusReport) -> list[str]:
    told = {difference.figure: difference for difference in study.differences if difference.figure in _KEY_FIGURES}
    a, b = title(study.a), title(study.b)
    said = []
    for path in _KEY_FIGURES:
        found = told.get(path)
        if found is not None and found.low is not None and found.high is not None:
            what = SAME if found.verdict == SAME else f"{b} is {found.verdict} than {a}"
            ratio = f"{found.ratio:.3f} times ({found.low:.3f} to {found.high:.3f})"
            said.append(f"{TITLES[path]}: {what}, {ratio}.")
    return [*said, *_shared(study)]


def _shared(study: Study) -> list[str]:
    ended = [f"Ended early: {study.ended_early}."] if study.ended_early else []
    return ended + [f"Note: {note}." for note in study.notes]


@singledispatch
def main_table(study: Study) -> Rows:
    raise TypeError(study)


@main_table.register
def _(study: SweepReport) -> Rows:
    marks = {study.peak: "peak", study.knee: "knee"}
    if study.peak == study.knee:
        marks[study.peak] = "peak, knee"
    firsts = [(f"{point.value:g}", marks.get(point.value, "")) for point in study.points]
    return _runs((study.swept, ""), firsts, study.reports)


@main_table.register
def _(study: FindReport) -> Rows:
    rows = [
        (
            f"{probe.value:g}",
            "client-bound" if probe.invalid else "held" if probe.held else "failed",
            number(probe.margin),
            number(probe.kept_up),
            probe.invalid or "; ".join(probe.misses),
        )
        for probe in study.probes
    ]
    return (study.searched, "", "nearest bound, measured / allowed", "completed / offered", "why"), rows


@main_table.register
def _(study: VersusReport) -> Rows:
    rows = [
        (
            TITLES[one.figure],
            number(one.a),
            number(one.b),
            f"{one.ratio:.3f}",
            "–" if one.low is None or one.high is None else f"{one.low:.3f} – {one.high:.3f}",
            one.verdict,
        )
        for one in study.differences
    ]
    rows += [("Requests failed", f"{study.a.failed:,}", f"{study.b.failed:,}", "", "", "")]
    return ("", f"A: {title(study.a)}", f"B: {title(study.b)}", "B / A", "95 % interval", "B is"), rows


def _runs(head: Sequence[str], firsts: Sequence[Sequence[str]], reports: Sequence[Report]) -> Rows:
    """A row for each run, with the figures that any of them has."""
    figures = [figure for figure in (RATES[0], RATES[2]) if any(value(report, figure.path) for report in reports)]
    latencies = [
        (f"{name} {statistic}", f"{field}.{statistic}")
        for field, (name, _) in LATENCIES.items()
        for statistic in ("p50", "p99")
        if field != "itl_ms" and any(value(report, f"{field}.p50") is not None for report in reports)
    ]
    goodput = any(report.goodput for report in reports)
    heads = [*head, *(figure.title for figure in figures), *(name for name, _ in latencies)]
    rows = [
        [
            *first,
            *(number(value(report, figure.path)) for figure in figures),
            *(number(value(report, path)) for _, path in latencies),
            *([percent(value(report, GOODPUT[1].path) or 0.0)] if goodput else []),
            f"{report.failed:,}",
            report.validity.verdict,
        ]
        for first, report in zip(firsts, reports, strict=True)
    ]
    return [*heads, *(["good"] if goodput else []), "failed", "verdict"], rows


def heading(study: Study) -> str:
    if isinstance(study, VersusReport):
        return f"{title(study.a)} and {title(study.b)}"
    name = title(study.reports[0]) if isinstance(study, FindReport) else study.points[0].report.options.target.model
    return f"{'Search' if isinstance(study, FindReport) else 'Sweep'}: {name}"


def summary(study: Study) -> str:
    """The answer and its table, for a terminal."""
    said = "\n".join(answer(study))
    return f"\n{heading(study)}\n\n{table(*main_table(study))}\n\n{said}\n"


def markdown(study: Study) -> str:
    parts = [f"# {escape(heading(study))}"]
    parts.append("\n".join(f"- {escape(line)}" for line in answer(study)))
    parts.append(table(*main_table(study)))
    if isinstance(study, FindReport):
        loads = [(f"{_load(study, report):g}", str(len(report.runs))) for report in study.reports]
        parts.append(table(*_runs((study.searched, "runs"), loads, study.reports)))
    parts.append("Latencies in milliseconds.")
    if isinstance(study, VersusReport):
        parts.append(
            f"Runs in the order {study.order}, one after the other. Values are geometric means. Intervals at 95 %: of "
            "figures that are the same, one in twenty shows a difference by chance."
        )
    return "\n\n".join([*parts, "Again with:", code(study.command)]) + "\n"


def _load(study: FindReport, report: Report) -> float:
    load = report.options.load
    return load.concurrency if study.searched == "concurrency" else load.rate or 0.0
