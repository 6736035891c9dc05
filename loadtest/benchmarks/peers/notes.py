"""Notes for the reader of a group's table: failures, doubts, a machine that was not alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from benchmarks.peers.plan import PROTOCOLS, Case
from benchmarks.peers.results import GroupResult
from penstock.loadtest.report.formatting import number, plural
from penstock.loadtest.report.markdown import escape

_NOTEWORTHY_CORES = 0.1
"""CPU of others, from which on a line says so."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NAMED = 4
"""Cases that a line names; of more it says how many."""


def notes(group: GroupResult) -> Iterator[str]:
    """A line for each thing, with the cases in which it was seen. Reasons that differ in their figures only are one,
    told with the largest."""
    for name, why in group.failures.items():
        yield f"{escape(group.titles[name])} did not take part: {first_line(why)}"
    if group.fault:
        yield f"**ended early by a fault of this command**: {first_line(group.fault)}"
    invalid: list[str] = []
    doubts: dict[str, dict[str, str]] = {}
    company: dict[str, float] = {}
    for result in group.cases:
        for name, cell in result.cells.items():
            where = f"{group.titles[name]}, {case_name(result.case)}"
            if cell.failure:
                yield f"{escape(where)}: {first_line(cell.failure)}"
            elif len(cell.runs) < group.settings.repeat:
                yield f"{escape(where)}: {plural(len(cell.runs), 'run')} instead of {group.settings.repeat}"
            for run in cell.runs:
                for reason in run.validity.reasons:
                    seen = doubts.setdefault(_NUMBER.sub("#", reason), {})
                    seen[where] = max(seen.get(where, ""), reason, key=_first_number)
            if cell.invalid:
                invalid.append(where)
            known = any("something else used" in reason for run in cell.runs for reason in run.validity.reasons)
            if cell.runs and not known and (foreign := cell.middle("foreign_cores")) > _NOTEWORTHY_CORES:
                company[where] = foreign
    if invalid:
        yield f"**invalid** runs are among those of {_places(invalid)}"
    for seen in doubts.values():
        yield f"**doubts**: {escape(max(seen.values(), key=_first_number))} ({_places(list(seen))})"
    if company:
        yield f"others used up to {number(max(company.values()))} cores meanwhile ({_places(list(company))})"


def _first_number(reason: str) -> float:
    match = _NUMBER.search(reason)
    return float(match[0]) if match else 0.0


def _places(cases: Sequence[str]) -> str:
    more = f"; and {len(cases) - _NAMED} more" if len(cases) > _NAMED else ""
    return escape("; ".join(cases[:_NAMED]) + more)


def first_line(reason: str) -> str:
    """What follows is of a log on this machine."""
    return escape(reason.partition("\n")[0])


def case_name(case: Case) -> str:
    kind = f"{case.model} {PROTOCOLS[case.protocol]} " if case.table == "tensors" else ""
    return f"{kind}{case.concurrency} at a time{', sampled' if case.sampled else ''}"


def at_a_time(case: Case) -> str:
    """The case's cell in the column of requests at a time."""
    return f"{case.concurrency}, sampled" if case.sampled else str(case.concurrency)
