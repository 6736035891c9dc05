"""A report in the few lines that a terminal shows after a run."""

from __future__ import annotations

from penstock.loadtest.report.describe import outcome, title
from penstock.loadtest.report.figures import GOODPUT, LATENCIES, RATES, load_name, value
from penstock.loadtest.report.formatting import clean, number, percent
from penstock.loadtest.report.markdown import table
from penstock.loadtest.report.model import Report

_STATISTICS = ("p50", "p90", "p99", "max", "mean")


def summary(report: Report) -> str:
    rates = [(figure.title, number(value(report, figure.path))) for figure in RATES if value(report, figure.path)]
    if report.goodput is not None:
        good = f"{number(report.goodput.requests_per_s)} ({percent(report.goodput.share)} of all)"
        rates.append((GOODPUT[0].title, good))
    latencies = [
        (f"{name}, ms", *(number(value(report, f"{field}.{statistic}")) for statistic in _STATISTICS))
        for field, (name, _) in LATENCIES.items()
        if value(report, f"{field}.p50") is not None
    ]
    parts = [f"{clean(title(report))}, {load_name(report.options)}: {outcome(report)}."]
    if note := report.tokens.get("note"):
        parts.append(f"Note: {clean(note)}.")
    parts += [f"{name}: {figure}" for name, figure in rates]
    if latencies:
        parts += ["", table(("", *_STATISTICS), latencies)]
    if report.errors:
        parts += ["", *(f"{count:,} × {kind}: {clean(_detail(report, kind))}" for kind, count in report.errors.items())]
    verdict = "; ".join(map(clean, report.validity.reasons))
    parts += ["", f"{report.validity.verdict}{': ' if verdict else ''}{verdict}"]
    if report.interrupted_by_user:
        parts.append("ended early: the figures are those until then")
    return "\n".join(["", *parts, ""])


def _detail(report: Report, kind: str) -> str:
    return report.error_details.get(kind, "")
