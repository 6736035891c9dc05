"""`penstock loadtest compare A.json B.json ...`: what differs between runs, and whether it is more than chance."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.metrics import Figures
from penstock.loadtest.repeats import student95
from penstock.loadtest.report.describe import title
from penstock.loadtest.report.figures import COMPARED, Figure, load_name, value
from penstock.loadtest.report.file import read
from penstock.loadtest.report.formatting import clean, number
from penstock.loadtest.report.html import page
from penstock.loadtest.report.markdown import escape, table
from penstock.loadtest.report.model import Interval, Report
from penstock.loadtest.report.write import check_places, put

_FEWEST = 2
"""Runs on both sides that make an interval."""
_IGNORED = ("output", "target.url", "target.api_key", "load.metrics_url", "load.repeat")
"""Settings that do not change what is measured, or are what is compared."""


class Ratio(NamedTuple):
    """Of one figure, B to A."""

    figure: Figure
    a: float
    """The mean of the runs."""
    b: float
    ratio: float | None
    """None when A is 0."""
    interval: Interval | None
    """At 95 %; None without repeats on both sides."""

    @property
    def verdict(self) -> str:
        if self.interval is None or self.ratio is None:
            return ""
        if self.interval.low <= 1 <= self.interval.high:
            return "no difference shown"
        return "better" if (self.ratio > 1) == self.figure.more_is_better else "worse"


def ratios(a: Report, b: Report) -> list[Ratio]:
    """Of the figures that both have."""
    rows = []
    for figure in COMPARED:
        left, right = value(a, figure.path), value(b, figure.path)
        if left is not None and right is not None and (left or right):
            rows.append(_ratio(figure, left, right, _runs(a.runs, figure), _runs(b.runs, figure)))
    return rows


def _runs(runs: Sequence[Figures], figure: Figure) -> list[float]:
    return [measured for run in runs if (measured := value(run, figure.path)) is not None]


def _ratio(figure: Figure, left: float, right: float, a: Sequence[float], b: Sequence[float]) -> Ratio:
    left, right = (statistics.fmean(runs) if runs else median for runs, median in ((a, left), (b, right)))
    return Ratio(figure, left, right, right / left if left else None, ratio_interval(a, b))


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Of mean(b) / mean(a) at 95 %: Welch's interval (spreads may differ), of the logarithms by the delta method.

    None for fewer than two runs on a side, or a mean that is not positive."""
    if min(len(a), len(b)) < _FEWEST or statistics.fmean(a) <= 0 or statistics.fmean(b) <= 0:
        return None
    parts = [statistics.variance(runs) / len(runs) / statistics.fmean(runs) ** 2 for runs in (a, b)]
    error = sum(parts)
    middle = math.log(statistics.fmean(b) / statistics.fmean(a))
    if error == 0:
        return Interval(round(math.exp(middle), 4), round(math.exp(middle), 4))
    degrees = error**2 / sum(part**2 / (len(runs) - 1) for part, runs in zip(parts, (a, b), strict=True))
    half = student95(max(1, math.floor(degrees + 1e-9))) * math.sqrt(error)
    return Interval(round(math.exp(middle - half), 4), round(math.exp(middle + half), 4))


def warnings(reports: Sequence[Report]) -> list[str]:
    """Why the comparison may not be one."""
    texts = []
    first = reports[0]
    for name, report in zip(names(reports), reports, strict=True):
        if report.validity.verdict != "valid":
            reasons = "; ".join(report.validity.reasons)
            texts.append(f"{name} is {report.validity.verdict}" + (f": {reasons}" if reasons else ""))
        if report.interrupted_by_user:
            texts.append(f"{name} was ended early")
        texts += [f"{where} differs: {a} and {b}" for where, a, b in differences(first, report)]
        if first.latency_from != report.latency_from:
            texts.append(f"latencies count from other moments: {first.latency_from} and {report.latency_from}")
    if any(len(report.runs) < _FEWEST for report in reports):
        texts.append("without repeats (--repeat 5) there are no intervals: small differences may be chance")
    return texts


def differences(a: Report, b: Report) -> list[tuple[str, str, str]]:
    """Settings and surroundings that are not the same: where, and both values."""
    trees = [
        {"": msgspec.to_builtins(report.options), "environment": msgspec.to_builtins(report.environment)}
        for report in (a, b)
    ]
    left, right = (dict(_leaves(tree[""])) | dict(_leaves(tree["environment"], "environment.")) for tree in trees)
    return [
        (where, _shown(left.get(where)), _shown(right.get(where)))
        for where in dict.fromkeys([*left, *right])
        if left.get(where) != right.get(where)
        and not where.startswith(_IGNORED)
        and not (where.startswith("environment.") and isinstance(left.get(where), float))  # measured, never equal
    ]


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for name, content in tree.items():
        nested = isinstance(content, dict)
        leaves += _leaves(content, f"{prefix}{name}.") if nested else [(prefix + name, content)]
    return leaves


def _shown(content: object) -> str:
    return "nothing" if content is None else clean(str(content), longest=60)


def names(reports: Sequence[Report]) -> list[str]:
    """Titles; where they are the same, with what tells them apart: the load, then the date."""
    titles = [title(report) for report in reports]
    for more in (lambda report: load_name(report.options), lambda report: report.date):
        titles = [
            f"{name}, {more(report)}" if titles.count(name) > 1 else name
            for name, report in zip(titles, reports, strict=True)
        ]
    return titles


def as_markdown(reports: Sequence[Report]) -> str:
    """The first report is what the others are compared with."""
    (first, *rest), (name, *other_names) = reports, names(reports)
    parts = [f"# {' and '.join(map(escape, [name, *other_names]))}"]
    if texts := warnings(reports):
        parts.append("\n".join(f"- {escape(warning)}" for warning in texts))
    for other_name, other in zip(other_names, rest, strict=True):
        if len(rest) > 1:
            parts.append(f"## {escape(other_name)}")
        parts.append(_table((f"A: {name}", first), (f"B: {other_name}", other)))
    if any(ratio.interval for other in rest for ratio in ratios(first, other)):
        parts.append(
            "Values are means of the runs. Intervals at 95 %: of figures that are the same, one in twenty shows a "
            "difference by chance."
        )
    return "\n\n".join(parts) + "\n"


def _table(left: tuple[str, Report], right: tuple[str, Report]) -> str:
    (a_name, a), (b_name, b) = left, right
    rows = [
        (f"{ratio.figure.title} {ratio.figure.unit}".strip(), *_cells(ratio), ratio.verdict) for ratio in ratios(a, b)
    ]
    rows += [("Requests completed", f"{a.completed:,}", f"{b.completed:,}", "", "", "")]
    rows += [("Requests failed", f"{a.failed:,}", f"{b.failed:,}", "", "", "")]
    return table(("", a_name, b_name, "B / A", "95 % interval", "B is"), rows)


def _cells(ratio: Ratio) -> tuple[str, str, str, str]:
    interval = "" if ratio.interval is None else f"{ratio.interval.low:.3f} – {ratio.interval.high:.3f}"
    return number(ratio.a), number(ratio.b), "–" if ratio.ratio is None else f"{ratio.ratio:.3f}", interval


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT.json", help="written by --json; the first is the measure")
    parser.add_argument(
        "--markdown", metavar="FILE", help="write the comparison as Markdown here, - for standard output"
    )
    parser.add_argument("--html", metavar="FILE", help="write one page of all reports here")
    parser.set_defaults(run_command=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, settings: dict[str, Any]) -> int:
    """0: compared; 2: a file is no report, or cannot be written."""
    args = argparse.Namespace(**settings)
    if len(args.reports) < 2:
        parser.error("a comparison needs two reports or more")
    try:
        check_places([args.markdown or "-", *([args.html] if args.html is not None else [])], read=args.reports)
        reports = [read(path) for path in args.reports]
    except LoadTestError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    text = as_markdown(reports)
    problems = [put(args.markdown or "-", text)]
    if args.html is not None:
        problems.append(put(args.html, page(reports)))
    for problem in filter(None, problems):
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    return 2 if any(problems) else 0
