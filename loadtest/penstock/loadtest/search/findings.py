"""The findings of sweeps, searches and comparisons, as sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.report.describe import title
from penstock.loadtest.report.figures import COMPARED, GOODPUT, LATENCIES, RATES, value
from penstock.loadtest.report.formatting import number, percent
from penstock.loadtest.report.markdown import table
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.model import Difference, FindReport, Probe, SweepReport, VersusReport
from penstock.loadtest.search.study import Findings, Rows
from penstock.loadtest.search.versus import SAME

TITLES = {figure.path: f"{figure.title} {figure.unit}".strip() for figure in COMPARED}
NUMBERS = [*(figure.path for figure in COMPARED), "completed", "failed", "verdict"]
"""Heads of `numbers`."""


def figures(head: Sequence[str], firsts: Sequence[Sequence[str]], reports: Sequence[Report]) -> Rows:
    """A row for each run, with the figures that any of them has, after cells of its own. Milliseconds."""
    rates = [figure for figure in (RATES[0], RATES[2]) if any(value(report, figure.path) for report in reports)]
    latencies = [
        (f"{name} {statistic}", f"{field}.{statistic}")
        for field, (name, _) in LATENCIES.items()
        for statistic in ("p50", "p99")
        if field != "itl_ms" and any(value(report, f"{field}.p50") is not None for report in reports)
    ]
    goodput = any(report.goodput for report in reports)
    heads = [*head, *(figure.title for figure in rates), *(name for name, _ in latencies)]
    rows = [
        [
            *first,
            *(number(value(report, figure.path)) for figure in rates),
            *(number(value(report, path)) for _, path in latencies),
            *([percent(value(report, GOODPUT[1].path) or 0.0)] if goodput else []),
            f"{report.failed:,}",
            report.validity.verdict,
        ]
        for first, report in zip(firsts, reports, strict=True)
    ]
    return [*heads, *(["good"] if goodput else []), "failed", "verdict"], rows


def numbers(report: Report) -> list[object]:
    """For programs."""
    compared = [value(report, figure.path) for figure in COMPARED]
    return [*compared, report.completed, report.failed, report.validity.verdict]


_KEY_FIGURES = ("output_tokens_per_s", "requests_per_s", "ttft_ms.p50", "ttft_ms.p99", "e2e_ms.p99")
_UNITS = {"rate": "requests per second", "concurrency": "requests at a time"}
_MILLISECONDS = "Latencies in milliseconds."


def sweep_findings(study: SweepReport) -> Findings:
    said = []
    if study.knee is not None:
        said.append(
            f"The knee is at {study.swept} {study.knee:g}: there the ratio of throughput to median latency is highest; "
            "more load beyond it raises latency by a larger factor than throughput."
        )
    if study.peak is not None:
        said.append(f"Throughput is highest at {study.swept} {study.peak:g}.")
    marks = [
        ", ".join(name for name, where in (("peak", study.peak), ("knee", study.knee)) if where == point.value)
        for point in study.points
    ]
    firsts = [(f"{point.value:g}", mark) for point, mark in zip(study.points, marks, strict=True)]
    return Findings(
        heading=f"Sweep: {title(study.points[0].report)}",
        answer=said,
        table=figures((study.swept, ""), firsts, study.reports),
        csv=([study.swept, *NUMBERS], [[f"{point.value:g}", *numbers(point.report)] for point in study.points]),
        below=[_MILLISECONDS],
    )


def search_findings(study: FindReport) -> Findings:
    loads = [(f"{_load(study, report):g}", str(len(report.runs))) for report in study.reports]
    return Findings(
        heading=f"Search: {title(study.reports[0])}",
        answer=_answer(study),
        table=_probes(study),
        csv=(
            [study.searched, "outcome", "margin", "kept_up", "why"],
            [[f"{probe.value:g}", _became(probe), probe.margin, probe.kept_up, _why(probe)] for probe in study.probes],
        ),
        below=[table(*figures((study.searched, "runs"), loads, study.reports)), _MILLISECONDS],
    )


def _answer(study: FindReport) -> list[str]:
    unit = _UNITS[study.searched]
    if study.held is None:
        what = "Nothing that was tried held" + (f": {study.failed:g} {unit} failed." if study.failed else ".")
    elif study.failed is None:
        what = f"{study.held:g} {unit} held; nothing that was tried failed."
    else:
        what = (
            f"The highest load that holds lies between {study.held:g} and {study.failed:g} {unit}: the first held, the "
            "second failed."
        )
    ends = {
        "client-bound": "The search ended since the client, not the server, was at its end.",
        "unfinished": "The search did not come to its end.",
    }
    return [what, *filter(None, [ends.get(study.outcome)]), f"Bounds: {'; '.join(study.bounds)}."]


def _probes(study: FindReport) -> Rows:
    open_loop = study.searched == "rate"  # a closed loop never comes faster than it is served
    rows = [
        (
            f"{probe.value:g}",
            _became(probe),
            number(probe.margin),
            *([number(probe.kept_up)] if open_loop else []),
            _why(probe),
        )
        for probe in study.probes
    ]
    return (study.searched, "", "measured / allowed", *(["completed / offered"] if open_loop else []), "why"), rows


def _became(probe: Probe) -> str:
    return "client-bound" if probe.invalid else "held" if probe.held else "failed"


def _why(probe: Probe) -> str:
    return probe.invalid or "; ".join(probe.misses)


def _load(study: FindReport, report: Report) -> float:
    load = report.options.load
    return load.concurrency if study.searched == "concurrency" else load.rate or 0.0


def comparison_findings(study: VersusReport) -> Findings:
    names = Difference.__struct_fields__
    return Findings(
        heading=f"{title(study.a)} and {title(study.b)}",
        answer=_compared(study),
        table=_differences(study),
        csv=(names, [[getattr(one, name) for name in names] for one in study.differences]),
        below=[
            f"Runs in the order {study.order}, one after the other. Values are geometric means of the runs. Intervals "
            "at 95 %: of figures that are the same, one in twenty shows a difference by chance."
        ],
    )


def _compared(study: VersusReport) -> list[str]:
    a, b = title(study.a), title(study.b)
    said = []
    for one in study.differences:
        if one.figure in _KEY_FIGURES and one.low is not None and one.high is not None:
            what = SAME if one.verdict == SAME else f"{b} is {one.verdict} than {a}"
            said.append(f"{TITLES[one.figure]}: {what}, {one.ratio:.3f} times ({one.low:.3f} to {one.high:.3f}).")
    return said


def _differences(study: VersusReport) -> Rows:
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
    rows.append(("Requests failed", f"{study.a.failed:,}", f"{study.b.failed:,}", "", "", ""))
    return ("", f"A: {title(study.a)}", f"B: {title(study.b)}", "B / A", "95 % interval", "B is"), rows
