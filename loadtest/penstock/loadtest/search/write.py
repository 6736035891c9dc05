"""Every form of the report of a row of runs that was asked for."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import OutputOptions
from penstock.loadtest.report.figures import COMPARED, value
from penstock.loadtest.report.file import rounded
from penstock.loadtest.report.html import page
from penstock.loadtest.report.html.markup import Markup, element
from penstock.loadtest.report.html.markup import table as html_table
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.redact import redacted_tree
from penstock.loadtest.report.write import put
from penstock.loadtest.search.model import Difference, FindReport, Study, SweepReport
from penstock.loadtest.search.words import answer, main_table, markdown


def check_output(output: OutputOptions) -> None:
    """Raises LoadTestError for forms that only single runs have."""
    for name in ("vllm_json", "aiperf_json"):
        if getattr(output, name) is not None:
            raise LoadTestError(f"{name.replace('_', '-')}: this is the form of a single run; a row of them has none")


def write_study(study: Study, output: OutputOptions) -> Study:
    """Writes to the files that `output` names; `-` is standard output. Returns it as written, without secrets. Raises
    LoadTestError for a file that cannot be written, after the others."""
    targets = [report.options.target for report in study.reports]
    written = msgspec.convert(redacted_tree(msgspec.to_builtins(study), targets), type(study))
    forms: tuple[tuple[str | None, Callable[[], str]], ...] = (
        (output.json, lambda: to_json(written)),
        (output.markdown, lambda: markdown(written)),
        (output.csv, lambda: to_csv(written)),
        (output.html, lambda: page(written.reports, lead(written))),
    )
    problems = [put(path, text()) for path, text in forms if path is not None]
    if any(problems):
        raise LoadTestError("; ".join(filter(None, problems)))
    return written


def to_json(study: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(study))), indent=2).decode() + "\n"


def lead(study: Study) -> list[Markup]:
    """The answer, above the plots."""
    return [*(element("p", line) for line in answer(study)), html_table(*main_table(study), numbers=False)]


def to_csv(study: Study) -> str:
    """A sweep: a row for each value. A search: one for each run. Two servers: one for each figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if isinstance(study, SweepReport):
        writer.writerow([study.swept, *(figure.path for figure in COMPARED), "completed", "failed", "verdict"])
        writer.writerows([point.value, *_figures(point.report)] for point in study.points)
    elif isinstance(study, FindReport):
        writer.writerow([study.searched, "held", "margin", "kept_up", "why"])
        for probe in study.probes:
            why = probe.invalid or "; ".join(probe.misses)
            writer.writerow([probe.value, probe.held and not probe.invalid, probe.margin, probe.kept_up, why])
    else:
        names = Difference.__struct_fields__
        writer.writerow(names)
        writer.writerows([getattr(one, name) for name in names] for one in study.differences)
    return text.getvalue()


def _figures(report: Report) -> Sequence[object]:
    return [
        *(value(report, figure.path) for figure in COMPARED),
        report.completed,
        report.failed,
        report.validity.verdict,
    ]
