"""The page: what several reports show together, then each by itself, and their data."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from penstock.loadtest.report.describe import title
from penstock.loadtest.report.figures import GOODPUT, LATENCIES, RATES, load_name, value
from penstock.loadtest.report.file import rounded
from penstock.loadtest.report.formatting import number, percent
from penstock.loadtest.report.html import sections
from penstock.loadtest.report.html.curve import curves, legend
from penstock.loadtest.report.html.markup import Content, Markup, element, table
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.redact import redacted

_NOTE = "Latencies in milliseconds. Runs that are invalid have hollow points in the plots."
_SHOWN = ("ttft_ms", "tpot_ms", "e2e_ms")
_OPEN_FOR_PRINT = "addEventListener('beforeprint',()=>document.querySelectorAll('.run').forEach(d=>d.open=true))"


def page(reports: Sequence[Report], lead: Content | Sequence[Content] = "", heading: str = "") -> str:
    """One HTML document; several reports get a curve and a table together first, `lead` stands before all. Without a
    `heading` it has their titles. Raises ValueError for none."""
    if not reports:
        raise ValueError("a page needs a report")
    reports = [redacted(report) for report in reports]
    names = list(dict.fromkeys(map(title, reports)))
    heading = heading or f"Load test: {' and '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    body = [_together(reports), *_each(reports)] if len(reports) > 1 else [_single(reports[0])]
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", heading),
        element("style", Markup(files(__package__).joinpath("style.css").read_text(encoding="utf-8"))),
    ]
    footer = element("footer", f"penstock loadtest, {reports[0].date}. This page holds the report's data as JSON.")
    main = element("main", element("h1", heading), lead, body, footer)
    scripts = [element("script", Markup(_OPEN_FOR_PRINT)), _data(reports)]
    whole = element("html", element("head", head), element("body", main, scripts), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _data(reports: Sequence[Report]) -> Markup:
    """The reports, to be read by programs."""
    text = msgspec.json.encode(rounded([msgspec.to_builtins(report) for report in reports])).decode()
    return element("script", Markup(text.replace("<", "\\u003c")), type="application/json", id="reports")


def _single(report: Report) -> Markup:
    return element("article", _parts(report))


def _parts(report: Report) -> list[Markup]:
    return [
        sections.verdict(report),
        sections.key_figures(report),
        sections.latencies(report),
        sections.attainment(report),
        sections.over_time(report),
        sections.errors(report),
        sections.server(report),
        sections.runs(report),
        sections.facts(report),
    ]


def _together(reports: Sequence[Report]) -> Markup:
    plots = curves(reports)
    return element(
        "section",
        element("h2", "Throughput and latency"),
        legend(reports),
        element("div", plots, class_="plots") if plots else "",
        _overview(reports),
    )


def _overview(reports: Sequence[Report]) -> Markup:
    shown = [field for field in _SHOWN if any(value(report, f"{field}.p50") is not None for report in reports)]
    rates = [RATES[0], RATES[2]] if any(report.output_tokens for report in reports) else [RATES[2]]
    goodput = any(report.goodput for report in reports)
    head: list[str] = ["Run", "Load", "Verdict", *(figure.title for figure in rates)]
    head += [f"{LATENCIES[field][0]} {statistic}" for field in shown for statistic in ("p50", "p99")]
    head += [*(["Good"] if goodput else []), "Failed"]
    rows = []
    for index, report in enumerate(reports, 1):
        row: list[Content] = [element("a", title(report), href=f"#run{index}"), load_name(report.options)]
        row += [sections.badge(report), *(number(value(report, figure.path)) for figure in rates)]
        row += [number(value(report, f"{field}.{statistic}")) for field in shown for statistic in ("p50", "p99")]
        if goodput:
            share = value(report, GOODPUT[1].path)
            row.append("–" if share is None else percent(share))
        rows.append([*row, f"{report.failed:,}"])
    return element("div", table(head, rows), element("p", _NOTE, class_="note"))


def _each(reports: Sequence[Report]) -> list[Markup]:
    found = []
    for index, report in enumerate(reports, 1):
        name = element("h2", f"{title(report)}, {load_name(report.options)}")
        summary = element("summary", name, sections.badge(report))
        article = element("article", _parts(report))
        found.append(element("details", summary, article, id=f"run{index}", class_="run"))
    return found
