"""The results of measurements. The JSON file is a PeersReport."""

from __future__ import annotations

import statistics
from math import nan
from typing import Any

import msgspec

from benchmarks.peers.plan import Case
from benchmarks.peers.settings import PeersSettings
from penstock.loadtest.metrics import Figures
from penstock.loadtest.repeats import medians
from penstock.loadtest.report.figures import RATES, Figure, value
from penstock.loadtest.report.model import Validity
from penstock.loadtest.search.model import Difference
from penstock.loadtest.search.versus import difference

SCHEMA = "penstock-peers/1"
_TOKENS, _, _REQUESTS = RATES
_TOGETHER = _TOKENS._replace(title="Output tokens/s, those that wait in one event")
_PER_CPU = Figure("tokens_per_cpu_second", "Output tokens per second of CPU, each in an event", "", True)
_LAST = Figure("last_per_second", "Last turns begun per second", "", True)
_FIRST = Figure("first_per_second", "Pictures answered per second, until the first token", "", True)
MAIN = {
    "generation": _TOKENS,
    "tensors": _REQUESTS,
    "paced": _PER_CPU,
    "streaming": _TOGETHER,
    "turns": _LAST,
    "images": _FIRST,
}
"""The figure that servers are compared by, for each table."""


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

    ttft_ms: list[float] = []
    """Of each request, where their order matters (turns, images)."""

    @property
    def first_ms(self) -> float:
        """Of the first request; nan: there is none."""
        return self.ttft_ms[0] if self.ttft_ms else nan

    @property
    def last_ms(self) -> float:
        return self.ttft_ms[-1] if self.ttft_ms else nan

    @property
    def tokens_per_cpu_second(self) -> float | None:
        """Of the process in front; None where its clock was too coarse."""
        return 1e6 / self.front_cpu_us if self.front_cpu_us else None

    def main(self, table: str) -> float | None:
        """What servers are compared by in this table."""
        figure = MAIN[table]
        if figure is _PER_CPU:
            return self.tokens_per_cpu_second
        if figure in (_LAST, _FIRST):
            return 1e3 / (self.last_ms if figure is _LAST else self.first_ms)
        return value(self.figures, figure.path)

    @property
    def tokens_per_piece(self) -> float:
        """In one event of a stream, on average; 0 without gaps between them."""
        gaps = self.figures.itl_ms.count if self.figures.itl_ms else 0
        return self.figures.output_tokens / (gaps + self.figures.completed) if gaps else 0.0


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

    @property
    def invalid(self) -> bool:
        """Some run has measured the client, or next to nothing."""
        return any(run.validity.verdict == "invalid" for run in self.runs)

    def middle(self, field: str) -> float:
        """The median of a number of the runs."""
        return float(statistics.median(getattr(run, field) for run in self.runs))


class CaseResult(msgspec.Struct, kw_only=True):
    case: Case
    cells: dict[str, Cell] = {}

    def ratios(self) -> dict[str, Difference]:
        """Of the main figure to that of the peer, the first, by name of the server; from pairs of runs of one round."""
        peer, *rest = self.cells
        return {name: ratio for name in rest if (ratio := self._ratio(self.cells[peer], self.cells[name]))}

    def _ratio(self, peer: Cell, other: Cell) -> Difference | None:
        table = self.case.table
        rates = [(a.main(table), b.main(table)) for a, b in zip(peer.runs, other.runs, strict=False)]
        pairs = [(a, b) for a, b in rates if a and b]
        return difference(MAIN[table], pairs) if pairs else None


class GroupResult(msgspec.Struct, kw_only=True):
    table: str
    model: str
    weights: str = "native"
    titles: dict[str, str]
    """Of the servers, by name; the first is the peer."""
    pinned: bool
    ready_seconds: dict[str, float] = {}
    """From start to ready."""
    failures: dict[str, str] = {}
    """Servers that did not take part, and why."""
    engines: dict[str, str] = {}
    """What those that generate compute in, and with how many threads."""
    cases: list[CaseResult] = []
    fault: str = ""
    """Why this command itself did not come to the end of it."""
    settings: PeersSettings
    date: str
    """ISO 8601, of the start."""
    command: str
    """All three as of the report that it was measured for."""


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
