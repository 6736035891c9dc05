"""What was measured. The JSON file is a PeersReport."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from penstock.loadtest.metrics import Figures
from penstock.loadtest.peers.plan import Case
from penstock.loadtest.peers.settings import PeersSettings
from penstock.loadtest.repeats import medians, ratio
from penstock.loadtest.report.figures import value
from penstock.loadtest.report.model import Interval, Validity

SCHEMA = "penstock-peers/1"
MAIN = {"generation": "output_tokens_per_s", "tensors": "requests_per_s", "streaming": "output_tokens_per_s"}
"""The figure that servers are compared by, for each table."""
_FEWEST = 3
"""Runs below which an interval says nothing."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    figures: Figures
    validity: Validity
    server_cores: float
    """CPU of the server's processes, over the run."""
    server_cpu_us: float
    """For each output token, or request for tensors."""
    front_cpu_us: float
    """The same of the process in front alone."""
    foreign_cores: float
    """CPU that was neither the server's nor the client's: other servers of the group, and whatever else ran."""


class Cell(msgspec.Struct, kw_only=True):
    """One server in one case."""

    runs: list[Run] = []
    failure: str = ""
    """Why there are no runs, or no more."""
    memory_mb: float = 0.0

    @property
    def figures(self) -> Figures | None:
        """Medians."""
        return msgspec.convert(medians([run.figures for run in self.runs]), Figures) if self.runs else None

    def middle(self, field: str) -> float:
        """The median of a number of the runs."""
        return statistics.median(getattr(run, field) for run in self.runs)


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Of a server's main figure to that of the peer, from runs that followed one another."""

    median: float
    interval: Interval | None
    """Of the mean, at 95 %; None for fewer than three pairs."""


class CaseResult(msgspec.Struct, kw_only=True):
    case: Case
    cells: dict[str, Cell] = {}

    def ratios(self) -> dict[str, Ratio]:
        """By name of the server, for all but the first."""
        peer, *others = self.cells
        return {name: found for name in others if (found := self._ratio(self.cells[peer], self.cells[name]))}

    def _ratio(self, peer: Cell, other: Cell) -> Ratio | None:
        path = MAIN[self.case.table]
        rates = [(value(a.figures, path), value(b.figures, path)) for a, b in zip(peer.runs, other.runs, strict=False)]
        pairs = [(a, b) for a, b in rates if a and b]
        if not pairs:
            return None
        middle = statistics.median(b / a for a, b in pairs)
        return Ratio(median=round(middle, 3), interval=ratio(pairs) if len(pairs) >= _FEWEST else None)


class GroupResult(msgspec.Struct, kw_only=True):
    table: str
    model: str
    titles: dict[str, str]
    """Of the servers, by name; the first is the peer."""
    pinned: bool
    ready_seconds: dict[str, float] = {}
    """From start to ready."""
    failures: dict[str, str] = {}
    """Servers that did not take part, and why."""
    cases: list[CaseResult] = []


class PeersReport(msgspec.Struct, kw_only=True):
    schema: str = SCHEMA
    date: str
    """ISO 8601, of the start."""
    command: str
    settings: PeersSettings
    environment: dict[str, Any]
    versions: dict[str, dict[str, str]]
    """Packages of each peer."""
    skipped: dict[str, str] = {}
    """Peers that were left out, and why."""
    groups: list[GroupResult] = []
    interrupted: bool = False


def to_json(report: PeersReport) -> bytes:
    """Ratios, which follow from the runs, are written beside them."""
    tree = msgspec.to_builtins(report)
    for group, written in zip(report.groups, tree["groups"], strict=True):
        for case, plain in zip(group.cases, written["cases"], strict=True):
            plain["ratios"] = msgspec.to_builtins(case.ratios())
    return msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"
