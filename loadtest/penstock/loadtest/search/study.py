"""A study is a report of several runs. Its findings are written in every form that a report has."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import OutputOptions
from penstock.loadtest.report.file import redacted_tree, rounded
from penstock.loadtest.report.formatting import clean
from penstock.loadtest.report.html import page
from penstock.loadtest.report.html.plot import Markup, element
from penstock.loadtest.report.html.plot import table as html_table
from penstock.loadtest.report.markdown import code, escape, numeric, table
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.write import check_files, put

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows of a table, as text."""


class Study(Protocol):
    """A report of several runs."""

    @property
    def command(self) -> str: ...
    @property
    def reports(self) -> list[Report]: ...
    @property
    def ended_early(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...


class Findings(NamedTuple):
    heading: str
    answer: list[str]
    """In sentences."""
    table: Rows
    csv: tuple[Sequence[str], Sequence[Sequence[object]]]
    """The same or more, as numbers."""
    below: Sequence[str] = ()
    """More parts, as Markdown."""


AnyStudy = TypeVar("AnyStudy", bound=Study)


def check_output(output: OutputOptions) -> None:
    """Raises LoadTestError for forms that only single runs have, and for files that could not be written."""
    check_files(output)
    for name in ("vllm_json", "aiperf_json"):
        if getattr(output, name) is not None:
            raise LoadTestError(f"{name.replace('_', '-')}: this is the form of a single run; a row of them has none")


def write_study(study: AnyStudy, describe: Callable[[AnyStudy], Findings], output: OutputOptions) -> AnyStudy:
    """Writes to the files that `output` names; `-` is standard output. Where nothing else goes there, a summary does.
    Returns the study as written, without secrets. Raises LoadTestError for a file that cannot be written, after the
    others."""
    targets = [report.options.target for report in study.reports]
    written = msgspec.convert(redacted_tree(msgspec.to_builtins(study), targets), type(study))
    findings = describe(written)
    forms: tuple[tuple[str | None, Callable[[], str]], ...] = (
        (output.json, lambda: to_json(written)),
        (output.markdown, lambda: markdown(findings, written)),
        (output.csv, lambda: to_csv(findings)),
        (output.html, lambda: page(written.reports, lead(findings, written), findings.heading)),
    )
    problems = [put(path, text()) for path, text in forms if path is not None]
    if not any(path == "-" for path, _ in forms):
        print(summary(findings, written))
    if any(problems):
        raise LoadTestError("; ".join(filter(None, problems)))
    return written


def to_json(study: Study) -> str:
    return msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(study))), indent=2).decode() + "\n"


def summary(findings: Findings, study: Study) -> str:
    """The answer and its table, for a terminal."""
    said = "\n".join(map(clean, _sentences(findings, study)))
    return f"\n{clean(findings.heading)}\n\n{table(*findings.table)}\n\n{said}\n"


def markdown(findings: Findings, study: Study) -> str:
    said = "\n".join(f"- {escape(line)}" for line in _sentences(findings, study))
    parts = [f"# {escape(findings.heading)}", said, table(*findings.table), *findings.below]
    return "\n\n".join([*parts, "Again with:", code(study.command)]) + "\n"


def lead(findings: Findings, study: Study) -> list[Markup]:
    """The answer, above the plots of a page."""
    return [
        *(element("p", line) for line in _sentences(findings, study)),
        html_table(*findings.table, right=numeric(*findings.table)),
    ]


def to_csv(findings: Findings) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head, rows = findings.csv
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def _sentences(findings: Findings, study: Study) -> list[str]:
    ended = [f"Ended early: {study.ended_early}."] if study.ended_early else []
    return [*findings.answer, *ended, *(f"Note: {note}." for note in study.notes), *_failures(study.reports)]


def _failures(reports: Sequence[Report]) -> list[str]:
    """How many requests of all runs failed in which way, and what the first of its kind said."""
    counts: Counter[str] = Counter()
    details: dict[str, str] = {}
    for report in reports:
        counts.update(report.errors)
        details = report.error_details | details
    return [f"Failed: {count:,} × {kind}: {clean(details.get(kind, ''))}" for kind, count in counts.most_common()]
