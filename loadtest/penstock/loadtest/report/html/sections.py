"""The parts of one report on the page."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.report.describe import (
    VERDICTS,
    flat,
    measuring,
    outcome,
    server_counters,
    server_metrics,
    server_seen,
    settings,
    what_was_run,
)
from penstock.loadtest.report.figures import LATENCIES, RATES, STATISTICS, value
from penstock.loadtest.report.formatting import duration, number, percent
from penstock.loadtest.report.html.latency_plots import attainment_plots, histogram_plots
from penstock.loadtest.report.html.markup import Content, Markup, element, table
from penstock.loadtest.report.html.timelines import timeline_plots
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
    found = report.intervals.get(path)
    return "" if found is None else f"{number(found.low)} – {number(found.high)}"


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
    found = [value(report, f"{path}.{statistic}") for statistic in STATISTICS]
    return [name, *(number(one) for one in found[:-1]), number(int(found[-1] or 0))]


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
    others = [(flag, text) for flag, text, is_chosen in settings(report.options) if not is_chosen]
    return element(
        "div",
        _section("What was run", table((), [*what_was_run(report), ("Outcome", outcome(report))], numbers=False)),
        _section("How it was measured", table((), measuring(report), numbers=False)),
        _section("Tokens", _pairs(report.tokens)),
        _section("Environment", _pairs(report.environment)),
        _section(
            "Settings",
            table((), chosen, numbers=False),
            element("details", element("summary", "Defaults"), table((), others, numbers=False)),
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
