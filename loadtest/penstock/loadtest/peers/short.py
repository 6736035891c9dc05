"""The report in one table: each form of Penstock beside each peer, over all cases."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from penstock.loadtest.peers.notes import case_name
from penstock.loadtest.peers.plan import Case
from penstock.loadtest.peers.results import MAIN, GroupResult, PeersReport
from penstock.loadtest.report.markdown import table
from penstock.loadtest.search.model import Difference

_HEAD = ("Beside", "Penstock's engine", "Measured", "Ratio: median", "Lowest", "Highest")


def short(report: PeersReport) -> str:
    """Ratios above 1 are in Penstock's favour."""
    return table(_HEAD, [row for group in report.groups for row in _rows(group)])


def _rows(group: GroupResult) -> Iterator[tuple[str, ...]]:
    peer, *others = group.titles
    figure = MAIN[group.table].title.lower()
    model = f", {group.model}" if group.model else ""
    for name in others:
        if not name.startswith("penstock"):
            continue
        found = [(ratio, result.case) for result in group.cases if (ratio := result.ratios().get(name))]
        if found:
            middle = statistics.median(ratio.ratio for ratio, _ in found)
            found.sort(key=lambda pair: pair[0].ratio)
            engine = group.titles[name].removeprefix("Penstock, ")
            yield group.titles[peer], engine, figure + model, f"{middle:.2f}", _shown(*found[0]), _shown(*found[-1])


def _shown(ratio: Difference, case: Case) -> str:
    return f"{ratio.ratio:.2f} ({case_name(case)})"
