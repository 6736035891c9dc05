"""The report in one table: each form of Penstock beside each peer, over all cases."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.peers.notes import case_name
from benchmarks.peers.results import MAIN, CaseResult, GroupResult, PeersReport
from penstock.loadtest.report.markdown import table
from penstock.loadtest.search.model import Difference

INVALID = "†"
"""Stands behind figures that an invalid run is among."""
_HEAD = ("Beside", "Penstock's engine", "Measured", "Ratio: median", "Lowest", "Highest")


def short_table(report: PeersReport) -> str:
    """Ratios above 1 are in Penstock's favour."""
    return table(_HEAD, [row for group in report.groups for row in _rows(group)])


def _rows(group: GroupResult) -> Iterator[tuple[str, ...]]:
    peer, *rest = group.titles
    title = MAIN[group.table].title
    figure = title[:1].lower() + title[1:]
    quantized = "" if group.weights == "native" else f" in {group.weights}"
    model = f", {group.model}{quantized}" if group.model else ""
    for name in rest:
        if not name.startswith("penstock"):
            continue
        ratios = [(ratio, result) for result in group.cases if (ratio := result.ratios().get(name))]
        if ratios:
            middle = statistics.median(ratio.ratio for ratio, _ in ratios)
            ratios.sort(key=lambda pair: pair[0].ratio)
            engine = group.titles[name].removeprefix("Penstock, ")
            lowest, highest = (_shown(ratio, result, (peer, name)) for ratio, result in (ratios[0], ratios[-1]))
            yield group.titles[peer], engine, figure + model, f"{middle:.2f}", lowest, highest


def _shown(ratio: Difference, result: CaseResult, names: Sequence[str]) -> str:
    mark = f" {INVALID}" if any(result.cells[name].invalid for name in names) else ""
    return f"{ratio.ratio:.2f} ({case_name(result.case)}){mark}"
