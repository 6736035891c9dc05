"""A report as one page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
from penstock.loadtest.report.formatting import clean, number, percent
from penstock.loadtest.report.model import Report

_LONGEST_COMMAND = 10_000
_SPECIAL = re.compile(r"([\\`*{}\[\]<>#|~&]|(?<!\w)_|_(?!\w))")
_WIDEST = 40
"""Columns up to here are filled up, so that a table reads well as text too."""


def markdown(report: Report) -> str:
    parts = [
        f"# Load test: {escape(title(report))}",
        _verdict(report),
        table(("What was run", ""), what_was_run(report)),
        "## Figures",
        _rates(report),
        _latencies(report),
        *_errors(report),
        *_section("Server during the run", _server(report)),
        *_section("How it was measured", [table(("", ""), measuring(report))]),
        *_section("Runs", _runs(report)),
        *_section("Tokens", _pairs(flat(report.tokens))),
        *_section("Environment", _pairs(flat(report.environment))),
        "## Settings",
        table(("Flag", "Value"), [(flag, text) for flag, text, chosen in settings(report.options) if chosen]),
        "Again with:",
        code(report.command),
    ]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text from elsewhere, shown as it is."""
    return _SPECIAL.sub(r"\\\1", clean(text))


def code(text: str) -> str:
    """A block of code that the text cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{clean(text, longest=_LONGEST_COMMAND)}\n{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are escaped; columns after the first are aligned right when they hold numbers only."""
    rows = list(rows)
    right = numeric(head, rows)
    lines = [[escape(cell) for cell in row] for row in (head, *rows)]
    widths = [min(_WIDEST, max(3, *(len(line[index]) for line in lines))) for index in range(len(head))]
    lines.insert(
        1, ["-" * (width - 1) + (":" if is_right else "-") for width, is_right in zip(widths, right, strict=True)]
    )
    filled = [
        [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in filled)


def numeric(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Of each column but the first, whether it holds numbers only."""
    return [index > 0 and all(_is_number(row[index]) for row in rows) for index in range(len(head))]


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[-–<>\d.,%\s±\[\]]*", text))


def _verdict(report: Report) -> str:
    validity = report.validity
    lines = [f"**{escape(validity.verdict.upper())}** {VERDICTS.get(validity.verdict, '')} {outcome(report)}."]
    return "\n".join([*lines, "", *(f"- {escape(reason)}" for reason in validity.reasons)]).strip()


def _rates(report: Report) -> str:
    rows = [(figure.title, *_with_interval(report, figure.path)) for figure in RATES]
    rows += [
        ("Requests completed", f"{report.completed:,}", ""),
        ("Requests failed", f"{report.failed:,}", ""),
        ("Prompt tokens", f"{report.prompt_tokens:,}", ""),
        ("Output tokens", f"{report.output_tokens:,}", ""),
    ]
    if report.goodput is not None:
        bounds = ", ".join(f"{o.name} ≤ {o.milliseconds:g} ms" for o in report.goodput.objectives)
        rows += [
            (f"Good requests ({bounds})", f"{report.goodput.good:,}", ""),
            (GOODPUT[0].title, *_with_interval(report, GOODPUT[0].path)),
            (GOODPUT[1].title, percent(report.goodput.share), _interval(report, GOODPUT[1].path)),
        ]
    if not report.intervals:
        return table(("", "Value"), [row[:2] for row in rows])
    return table(("", "Median of the runs", "95 % interval"), rows)


def _with_interval(report: Report, path: str) -> tuple[str, str]:
    return number(value(report, path)), _interval(report, path)


def _interval(report: Report, path: str) -> str:
    interval = report.intervals.get(path)
    return "" if interval is None else f"{number(interval.low)} – {number(interval.high)}"


def _latencies(report: Report) -> str:
    rows = []
    named = {field: name for field, (name, _) in LATENCIES.items()}
    sources = [(name, field, field) for field, name in named.items()]
    sources += [(f"{named[field]} from send", f"from_send.{field}", field) for field in ("ttft_ms", "e2e_ms")]
    for name, path, field in sources:
        if value(report, f"{path}.p50") is None or (path != field and report.latency_from == "sent"):
            continue
        rows.append((name, *(_statistic(report, path, statistic) for statistic in STATISTICS)))
        if f"{path}.p50" in report.intervals:
            rows.append((f"{name}, 95 %", *(_interval(report, f"{path}.{one}") for one in STATISTICS[:-2]), "", ""))
    return table(("Milliseconds", *STATISTICS), rows) if rows else "No request was completed: there are no latencies."


def _statistic(report: Report, path: str, statistic: str) -> str:
    figure = value(report, f"{path}.{statistic}")
    return number(int(figure)) if figure is not None and statistic == "count" else number(figure)


def _errors(report: Report) -> list[str]:
    if not report.errors:
        return []
    rows = [(kind, f"{count:,}", report.error_details.get(kind, "")) for kind, count in report.errors.items()]
    return ["## Errors", table(("Kind", "Requests", "The first said"), rows)]


def _server(report: Report) -> list[str]:
    watch = report.server
    if watch is None:
        return []
    parts = [escape(server_seen(watch))]
    if rows := server_metrics(report):
        parts.append(table(("Gauge", "least", "mean", "most"), rows))
    if counters := server_counters(report):
        parts.append(table(("Counter", "grew by"), counters))
    return [part for part in parts if part]


def _runs(report: Report) -> list[str]:
    if len(report.runs) < 2:
        return []
    paths = ("output_tokens_per_s", "requests_per_s", "ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "e2e_ms.p99")
    rows = [(str(index), *(number(value(run, path)) for path in paths)) for index, run in enumerate(report.runs, 1)]
    return [table(("Run", *paths), rows)]


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [table(("", ""), pairs)] if pairs else []


def _section(heading: str, parts: Sequence[str]) -> list[str]:
    return [f"## {heading}", *parts] if parts else []


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
