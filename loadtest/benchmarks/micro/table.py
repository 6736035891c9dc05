"""Results on a terminal, in the columns of pytest-benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.micro.compare import compare
from benchmarks.micro.results import Result
from penstock.loadtest.report.formatting import number

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_GAP = "  "


def span(seconds: float) -> str:
    """With the unit that suits it: `12.3 us`."""
    unit, size = next((each for each in _UNITS if seconds >= each[1]), _UNITS[-1])
    return f"{number(seconds / size)} {unit}"


def table(results: Sequence[Result]) -> str:
    head = ["name", "operation", "min", "mean", "median", "stddev", "IQR", "outliers", "ops/s", "rounds", "iterations"]
    counted = any(each.extra_info.instructions is not None for each in results)
    return _aligned([head + ["instructions"] * counted, *(_row(each, counted) for each in results)])


def _row(result: Result, counted: bool) -> list[str]:
    stats = result.stats
    times = [span(value) for value in (stats.min, stats.mean, stats.median, stats.stddev, stats.iqr)]
    cells = [result.name, result.extra_info.operation, *times, stats.outliers]
    cells += [number(stats.ops), number(stats.rounds), number(stats.iterations)]
    return cells + [number(result.extra_info.instructions)] * counted


def comparison(results: Sequence[Result], earlier: Mapping[str, Result]) -> str:
    """Of those that both have; the others are named below."""
    rows = [["name", "median before", "now", "ratio", "", "instructions, ratio", ""]]
    for now in results:
        before = earlier.get(now.name)
        if before is None:
            continue
        found = compare(now, before)
        rows.append(
            [
                now.name,
                span(before.stats.median),
                span(now.stats.median),
                f"{found.time:.2f}",
                found.time_verdict,
                "–" if found.instructions is None else f"{found.instructions:.3f}",
                found.instructions_verdict,
            ]
        )
    new = [each.name for each in results if each.name not in earlier]
    text = _aligned(rows) if len(rows) > 1 else "nothing to compare"
    return f"{text}\nnot in the earlier file: {', '.join(new)}" if new else text


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """The first columns to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_GAP.join(cells).rstrip())
    return "\n".join(lines)
