"""The report of `penstock verify`: the structs are the JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from penstock.gateway.commands.bench.figures import Machine, machine_lines

Result = Literal["pass", "warn", "FAIL", "skipped"]
_RESULTS: tuple[Result, ...] = ("pass", "warn", "FAIL", "skipped")
_WORST_FIRST: tuple[Result, ...] = ("FAIL", "warn", "pass", "skipped")
_WIDTH = 118


class Row(msgspec.Struct, frozen=True):
    """What one check found."""

    check: str
    result: Result
    detail: str
    """One sentence or two, for a person."""
    figures: dict[str, Any] = {}
    """The same, and more, for programs."""


class Notes:
    """Collects what a check finds; the row gets the worst result, and its notes first."""

    def __init__(self, check: str) -> None:
        self._check = check
        self._notes: list[tuple[Result, str]] = []

    def add(self, result: Result, note: str) -> None:
        self._notes.append((result, note))

    def row(self, **figures: Any) -> Row:
        order = sorted(self._notes, key=lambda note: _WORST_FIRST.index(note[0]))
        return Row(self._check, order[0][0], "; ".join(note for _, note in order), figures)


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    model: str
    runner: str
    """With its settings."""
    settings: Mapping[str, Any]
    """Those that are not the defaults, by name: enough to run this again."""
    rows: list[Row]
    seconds: float

    @property
    def failed(self) -> bool:
        return any(row.result == "FAIL" for row in self.rows)


def page(report: VerifyReport) -> str:
    return "\n".join(_lines(report))


def _lines(report: VerifyReport) -> Iterable[str]:
    yield from machine_lines(report.machine)
    yield f"{report.model}: {report.runner}"
    if report.settings:
        yield "settings: " + ", ".join(f"{name}={value}" for name, value in report.settings.items())
    yield ""
    width = max(len(row.check) for row in report.rows)
    for row in report.rows:
        begin = f"{row.check:{width}}  {row.result:7}  "
        yield textwrap.fill(
            row.detail,
            _WIDTH,
            initial_indent=begin,
            subsequent_indent=" " * len(begin),
            break_long_words=False,
            break_on_hyphens=False,
        )
    yield ""
    yield _verdict(report)


def _verdict(report: VerifyReport) -> str:
    counts = Counter(row.result for row in report.rows)
    listed = ", ".join(f"{counts[result]} {result}" for result in _RESULTS if counts[result])
    if report.failed:
        words = "does not work here: " + ", ".join(row.check for row in report.rows if row.result == "FAIL")
    elif counts["warn"]:
        words = "works, with warnings: " + ", ".join(row.check for row in report.rows if row.result == "warn")
    else:
        words = "works"
    return f"{report.model} {words} ({listed}; {report.seconds:.0f} s)"
