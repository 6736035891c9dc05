"""Reports of several runs: sweeps, searches for the highest load, and comparisons of two servers. As JSON, each holds
the reports of its runs whole."""

from __future__ import annotations

import msgspec

from penstock.loadtest.report.model import Report


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Of a sweep."""

    value: float
    report: Report


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run for each value of a setting."""

    schema: str = "penstock-loadtest-sweep/1"
    date: str
    """ISO 8601, of the start."""
    command: str
    swept: str
    """The setting."""
    points: list[Point]
    """In the order of the values."""
    peak: float | None
    """The value with the highest throughput, of the runs that are not invalid."""
    knee: float | None
    """The value beyond which more load buys more latency than throughput; see `sweep.knee`. None: not among these."""
    notes: list[str] = []
    ended_early: str = ""
    """Why values are missing; empty: all have been run."""

    @property
    def reports(self) -> list[Report]:
        return [point.report for point in self.points]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a search."""

    value: float
    held: bool
    margin: float
    """Of the bound that came nearest to being broken, or was broken the most: measured / allowed; above 1 it was. Of
    keeping up, this is what was not completed."""
    misses: list[str]
    """Bounds that were broken."""
    kept_up: float
    """The rate at which requests were completed, as a share of the rate at which they came."""
    invalid: str = ""
    """Why it says nothing about the server; empty: it does."""


class FindReport(msgspec.Struct, frozen=True, kw_only=True):
    """The highest load that holds, between `held` and `failed`."""

    schema: str = "penstock-loadtest-find/1"
    date: str
    command: str
    searched: str
    """`rate` (requests per second) or `concurrency`."""
    bounds: list[str]
    held: float | None
    """The highest load that held, below all that failed; None: none did."""
    failed: float | None
    """The lowest load that failed; None: none did."""
    outcome: str
    """`found`: held and failed are as near as asked for; `nothing held`; `unfinished`: out of runs, or ended early;
    `client-bound`: the client, not the server, was at its end."""
    probes: list[Probe]
    """In the order in which they were run."""
    reports: list[Report]
    """One for each value that was tried, upwards."""
    notes: list[str] = []
    ended_early: str = ""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Of one figure between two servers."""

    figure: str
    """By its path in a report, as `ttft_ms.p50`."""
    a: float
    """Geometric mean of the runs, so that `b` / `a` is `ratio`."""
    b: float
    ratio: float
    low: float | None
    """Of the 95 % interval of the ratio; None for fewer than two pairs of runs."""
    high: float | None
    verdict: str
    """`faster`, `slower` (of shares: `better`, `worse`): what B is; or `no difference seen`, or empty: not known."""


class VersusReport(msgspec.Struct, frozen=True, kw_only=True):
    """Two servers, measured in turn with the same load, never at the same time."""

    schema: str = "penstock-loadtest-versus/1"
    date: str
    command: str
    a: Report
    b: Report
    order: str
    """Of the runs, as `ABBA`."""
    differences: list[Difference]
    notes: list[str] = []
    ended_early: str = ""

    @property
    def reports(self) -> list[Report]:
        return [self.a, self.b]
