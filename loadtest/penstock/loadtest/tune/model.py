"""What tuning comes to. As JSON it holds the reports of its runs whole."""

from __future__ import annotations

import msgspec

from penstock.loadtest.report.model import Report


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One combination."""

    settings: dict[str, str]
    objective: float | None = None
    misses: list[str] = []
    """Bounds that were broken."""
    problem: str = ""
    """Why there is no report: the server did not start, or did not answer."""
    report: Report | None = None


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "penstock-tune/1"
    date: str
    command: str
    objective: str
    more_is_better: bool
    bounds: list[str]
    tried: list[Tried]
    """In the order in which they were run."""
    best: int | None
    """Index of the best that keeps the bounds, of those whose figures can be used; None: none does."""
    like_best: list[int] = []
    """Those that keep the bounds and cannot be told from it: 95 % intervals that touch (with three repeats or more)."""
    best_command: str = ""
    """That starts the best server."""
    best_config: dict[str, list[str]] = {}
    """Lines for config.pbtxt, by model."""
    notes: list[str] = []
    ended_early: str = ""

    @property
    def reports(self) -> list[Report]:
        return [tried.report for tried in self.tried if tried.report is not None]
