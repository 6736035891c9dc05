"""Findings of `penstock doctor`: the structs are the JSON, and the page is made of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

Verdict = Literal["ok", "note", "problem"]
"""note: something is missing that a server may never need; problem: a server would fail, or serve badly."""
_WIDTH = 118
_MARKS = {"ok": "ok", "note": "-", "problem": "PROBLEM"}


class Finding(msgspec.Struct, frozen=True):
    subject: str
    """What was looked at, in a word or two."""
    verdict: Verdict
    detail: str
    """For a person, with the way out of a problem."""
    figures: dict[str, Any] = {}
    """For programs."""


class Section(msgspec.Struct, frozen=True):
    title: str
    findings: Sequence[Finding]


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    versions: dict[str, str]
    sections: Sequence[Section]

    @property
    def problems(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings if finding.verdict == "problem"]


def page(report: DoctorReport) -> str:
    return "\n".join(_lines(report))


def size_text(num_bytes: float) -> str:
    """ "3.2 GiB", "480 MiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _lines(report: DoctorReport) -> Iterable[str]:
    yield "penstock " + report.versions.get("penstock-server", "")
    yield from _filled(", ".join(f"{name} {version}" for name, version in report.versions.items()), "")
    width = max(len(finding.subject) for section in report.sections for finding in section.findings)
    for section in report.sections:
        yield ""
        yield section.title
        for finding in section.findings:
            yield from _filled(finding.detail, f"  {finding.subject:{width}}  {_MARKS[finding.verdict]:7}  ")
    yield ""
    if report.problems:
        count = len(report.problems)
        yield f"{count} problem{'s' * (count > 1)}: " + ", ".join(finding.subject for finding in report.problems)
    else:
        yield "no problems found"
    yield "A report of a problem should hold this page, the command line, and the file of `penstock debug bundle`."


def _filled(text: str, begin: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )
