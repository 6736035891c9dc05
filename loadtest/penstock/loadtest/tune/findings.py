"""The findings of tuning, as sentences and tables."""

from __future__ import annotations

import msgspec

from penstock.loadtest.report.formatting import number
from penstock.loadtest.report.markdown import code, escape, table
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.findings import NUMBERS, figures, numbers
from penstock.loadtest.search.study import Findings, Rows


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


def tuning_findings(study: TuneReport) -> Findings:
    measured = [tried for tried in study.tried if tried.report is not None]
    names = list(study.tried[0].settings)
    nothing: list[object] = [None] * len(NUMBERS)
    rows = [
        [*tried.settings.values(), tried.objective, _mark(study, index), _why(tried)]
        + (nothing if tried.report is None else numbers(tried.report))
        for index, tried in enumerate(study.tried)
    ]
    runs = figures(names, [list(tried.settings.values()) for tried in measured], study.reports)
    return Findings(
        heading=f"Tuning for {study.objective}",
        answer=_answer(study),
        table=_table(study, names),
        csv=([*names, study.objective, "mark", "why", *NUMBERS], rows),
        below=[*_how(study), table(*runs), "Latencies in milliseconds."],
    )


def _answer(study: TuneReport) -> list[str]:
    bounds = f"Bounds: {'; '.join(study.bounds)}."
    if study.best is None:
        return ["Nothing that was tried keeps the bounds with figures that can be used.", bounds]
    best = study.tried[study.best]
    said = [
        f"Best: {_name(best)}, {study.objective} {number(best.objective)} "
        f"({'highest' if study.more_is_better else 'lowest'} of {len(study.tried)})."
    ]
    if study.like_best:
        alike = "; ".join(_name(study.tried[index]) for index in study.like_best)
        said.append(f"Not to be told from it, by their 95 % intervals: {alike}.")
    elif best.report is not None and not best.report.intervals:
        said.append("Without repeats (--repeat 3) small differences may be chance.")
    said.append(f"Start it with: {study.best_command}")
    said += [f"In config.pbtxt of {model}: {' '.join(lines)}" for model, lines in study.best_config.items()]
    return [*said, bounds]


def _name(tried: Tried) -> str:
    return ", ".join(f"{name} {value}" for name, value in tried.settings.items())


def _table(study: TuneReport, names: list[str]) -> Rows:
    rows = []
    for index, tried in enumerate(study.tried):
        verdict = "" if tried.report is None else tried.report.validity.verdict
        mark = _mark(study, index)
        rows.append([*tried.settings.values(), number(tried.objective), mark, verdict, _why(tried)])
    return [*names, study.objective, "", "verdict", "broken bounds"], rows


def _mark(study: TuneReport, index: int) -> str:
    return "best" if index == study.best else "like it" if index in study.like_best else ""


def _why(tried: Tried) -> str:
    return tried.problem or "; ".join(tried.misses)


def _how(study: TuneReport) -> list[str]:
    parts = ["Start it with:", code(study.best_command)] if study.best_command else []
    for model, lines in study.best_config.items():
        parts += [f"In config.pbtxt of {escape(model)}:", *(code(line) for line in lines)]
    return parts
