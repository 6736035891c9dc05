"""The HTML page: the plots that several reports share, each report's sections, and their data."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from penstock.loadtest.report.describe import (
    VERDICTS,
    flat,
    measuring,
    outcome,
    server_counters,
    server_metrics,
    server_seen,
    settings,
    title,
    what_was_run,
)
from penstock.loadtest.report.figures import GOODPUT, LATENCIES, RATES, STATISTICS, load_name, value
from penstock.loadtest.report.file import redacted, rounded
from penstock.loadtest.report.formatting import duration, number, percent
from penstock.loadtest.report.html.plot import Content, Markup, element, table
from penstock.loadtest.report.html.plots import attainment_plots, curves, histogram_plots, legend, timeline_plots
from penstock.loadtest.report.model import Report

_SIGNS = {"valid": "✓", "doubtful": "!", "invalid": "✕"}


def badge(report: Report) -> Markup:
    verdict = report.validity.verdict
    known = verdict if verdict in VERDICTS else "invalid"
    return element("span", element("i", _SIGNS[known], aria_hidden="true"), verdict, class_=f"badge {known}")


def verdict(report: Report) -> Markup:
    reasons = [element("li", reason) for reason in report.validity.reasons]
    return element(
        "div",
        element("p", badge(report), " ", VERDICTS.get(report.validity.verdict, "")),
        element("ul", reasons) if reasons else "",
        class_="verdict",
    )


def key_figures(report: Report) -> Markup:
    tiles = []
    for figure in RATES:
        spread = _spread(report, figure.path)
        tiles.append(_tile(figure.title, number(value(report, figure.path)), spread and f"95 %: {spread}"))
    if not report.output_tokens:
        tiles = tiles[2:]
    for field, (name, what) in LATENCIES.items():
        if value(report, f"{field}.p50") is not None and field != "itl_ms":
            p50, p99 = (value(report, f"{field}.{statistic}") for statistic in ("p50", "p99"))
            tiles.append(_tile(f"{name} p50", duration(p50), f"p99 {duration(p99)}", hint=what))
    if report.goodput is not None:
        bounds = ", ".join(f"{o.name} ≤ {number(o.milliseconds)} ms" for o in report.goodput.objectives)
        good = f"{report.goodput.good:,}, {number(report.goodput.requests_per_s)}/s: {bounds}"
        tiles.append(_tile("Good requests", percent(report.goodput.share), good))
    of = f"of {report.ended:,} requests" + (f" of {len(report.runs)} runs" if len(report.runs) > 1 else "")
    share = f"{percent(report.failed / report.ended)} {of}" if report.failed else of
    tiles.append(_tile("Failed", f"{report.failed:,}", share, bad=report.failed > 0))
    return element("dl", tiles, class_="tiles")


def _tile(name: str, figure: str, below: str, *, hint: str | None = None, bad: bool = False) -> Markup:
    return element(
        "div",
        element("dt", name, title=hint),
        element("dd", figure, class_="bad" if bad else None),
        element("dd", below, class_="below") if below else "",
    )


def _spread(report: Report, path: str) -> str:
    interval = report.intervals.get(path)
    return "" if interval is None else f"{number(interval.low)} – {number(interval.high)}"


def latencies(report: Report) -> Markup:
    """The table; with it the histograms."""
    rows: list[Sequence[Content]] = []
    for field, (name, what) in LATENCIES.items():
        if value(report, f"{field}.p50") is None:
            continue
        rows.append(_latency_row(report, element("abbr", name, title=what), field))
        if f"{field}.p50" in report.intervals:
            spreads = [_spread(report, f"{field}.{one}") for one in STATISTICS[:-2]]
            rows.append([element("small", "95 % interval"), *(element("small", spread) for spread in spreads), "", ""])
    if report.latency_from == "intended":
        rows += [
            _latency_row(report, f"{LATENCIES[field][0]} from send", f"from_send.{field}")
            for field in ("ttft_ms", "e2e_ms")
            if value(report, f"from_send.{field}.p50") is not None
        ]
    if not rows:
        return Markup("")
    head = ("Milliseconds", *STATISTICS)
    note = f"Medians of {len(report.runs)} runs, and the intervals of their means; plots show the last run."
    several = element("p", note, class_="note") if len(report.runs) > 1 else ""
    return _section("Latencies", table(head, rows), several, _grid(histogram_plots(report)))


def _latency_row(report: Report, name: Content, path: str) -> list[Content]:
    values = [value(report, f"{path}.{statistic}") for statistic in STATISTICS]
    return [name, *(number(one) for one in values[:-1]), number(int(values[-1] or 0))]


def attainment(report: Report) -> Markup:
    return _section("Share of requests within a bound", _grid(attainment_plots(report)))


def over_time(report: Report) -> Markup:
    return _section("Over time", _grid(timeline_plots(report.timeline)))


def errors(report: Report) -> Markup:
    if not report.errors:
        return Markup("")
    rows = [(kind, f"{count:,}", report.error_details.get(kind, "")) for kind, count in report.errors.items()]
    return _section("Errors", table(("Kind", "Requests", "The first said"), rows, numbers=False))


def server(report: Report) -> Markup:
    watch = report.server
    if watch is None:
        return Markup("")
    said = server_seen(watch)
    gauges = server_metrics(report)
    counters = server_counters(report)
    return _section(
        "Server during the run",
        element("p", said) if said else "",
        table(("Gauge", "least", "mean", "most"), gauges) if gauges else "",
        table(("Counter", "grew by"), counters) if counters else "",
    )


def runs(report: Report) -> Markup:
    if len(report.runs) < 2:
        return Markup("")
    paths = (*(figure.path for figure in RATES), *(f"{field}.{one}" for field in LATENCIES for one in ("p50", "p99")))
    paths = tuple(path for path in paths if value(report, path) is not None)
    rows = [[f"Run {index}", *(number(value(run, path)) for path in paths)] for index, run in enumerate(report.runs, 1)]
    heads = [path.replace("_per_s", "/s").replace("_ms.", " ").replace("_", " ") for path in paths]
    return _section("Runs", table(("", *heads), rows))


def facts(report: Report) -> Markup:
    """What was run, with what, on what, and how to do it again."""
    chosen = [(flag, text) for flag, text, is_chosen in settings(report.options) if is_chosen]
    defaults = [(flag, text) for flag, text, is_chosen in settings(report.options) if not is_chosen]
    return element(
        "div",
        _section("What was run", table((), [*what_was_run(report), ("Outcome", outcome(report))], numbers=False)),
        _section("How it was measured", table((), measuring(report), numbers=False)),
        _section("Tokens", _pairs(report.tokens)),
        _section("Environment", _pairs(report.environment)),
        _section(
            "Settings",
            table((), chosen, numbers=False),
            element("details", element("summary", "Defaults"), table((), defaults, numbers=False)),
        ),
        _section("Again with", element("pre", element("code", report.command), tabindex="0")),
        class_="facts",
    )


def _pairs(tree: dict[str, object]) -> Markup:
    pairs = flat(tree)
    return table((), pairs, numbers=False) if pairs else Markup("")


def _grid(plots: Sequence[Markup]) -> Markup:
    return element("div", plots, class_="plots") if plots else Markup("")


def _section(heading: str, *parts: Content) -> Markup:
    """Nothing, when nothing is in it."""
    there = [part for part in parts if part]
    return element("section", element("h3", heading), there) if there else Markup("")


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
    body = [_together(reports), *_runs(reports)] if len(reports) > 1 else [_single(reports[0])]
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
        verdict(report),
        key_figures(report),
        latencies(report),
        attainment(report),
        over_time(report),
        errors(report),
        server(report),
        runs(report),
        facts(report),
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
        row += [badge(report), *(number(value(report, figure.path)) for figure in rates)]
        row += [number(value(report, f"{field}.{statistic}")) for field in shown for statistic in ("p50", "p99")]
        if goodput:
            share = value(report, GOODPUT[1].path)
            row.append("–" if share is None else percent(share))
        rows.append([*row, f"{report.failed:,}"])
    return element("div", table(head, rows), element("p", _NOTE, class_="note"))


def _runs(reports: Sequence[Report]) -> list[Markup]:
    runs = []
    for index, report in enumerate(reports, 1):
        name = element("h2", f"{title(report)}, {load_name(report.options)}")
        summary = element("summary", name, badge(report))
        article = element("article", _parts(report))
        runs.append(element("details", summary, article, id=f"run{index}", class_="run"))
    return runs
