"""The same requests to Triton and to us: the answers are the same, but for the table in differences.py."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from differential import (
    cases_batching,
    cases_cache,
    cases_clients,
    cases_configurations,
    cases_counts,
    cases_describe,
    cases_ensembles,
    cases_generate,
    cases_grpc,
    cases_hostile,
    cases_http,
    cases_models,
    cases_rate_limiter,
    cases_sequence,
    cases_stream,
    triton_server,
)
from differential.compare import unexpected
from differential.differences import DIFFERENCES, Difference
from differential.observe import Case
from differential.peers import Pair

CASES = [
    case
    for module in (
        cases_describe,
        cases_http,
        cases_hostile,
        cases_generate,
        cases_grpc,
        cases_stream,
        cases_clients,
        cases_models,
        cases_configurations,
        cases_counts,
        cases_cache,
        cases_sequence,
        cases_ensembles,
        cases_batching,
        cases_rate_limiter,
    )
    for case in module.CASES
]


def compare(case: Case, pair: Pair) -> None:
    problems = unexpected(case.name, of_triton(case, pair), case.run(pair.ours), DIFFERENCES)
    assert not problems, "\n".join(problems)


def of_triton(case: Case, pair: Pair) -> Any:
    """Asked once more if its process has ended meanwhile."""
    try:
        answer = case.run(pair.triton)
    except Exception:
        if not pair.revive():
            raise
    else:
        if not pair.revive():
            return answer
    return case.run(pair.triton)


HERE = CASES if triton_server.environment() else CASES[:1]
"""Without Triton one is enough, which says why it is skipped."""


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_same_answer(case: Case, explicit: Pair) -> None:
    compare(case, explicit)


@pytest.mark.parametrize("case", cases_models.UNCONTROLLED, ids=lambda case: case.name)
def test_same_answer_without_control(case: Case, uncontrolled: Pair) -> None:
    compare(case, uncontrolled)


@pytest.mark.parametrize("case", cases_hostile.REFUSED, ids=lambda case: case.name)
def test_what_ends_triton_is_refused(case: Case, explicit: Pair) -> None:
    assert case.run(explicit.ours) == {"refused": True}


def test_cases_have_names_of_their_own() -> None:
    names = Counter(case.name for case in (*CASES, *cases_models.UNCONTROLLED))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.id)
def test_each_row_speaks_of_cases(row: Difference) -> None:
    patterns = [pattern for shown in row.shown for pattern in shown.cases]
    assert [p for p in patterns if not any(fnmatchcase(case.name, p) for case in CASES)] == []


def test_the_documentation_shows_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs/kserve.md").read_text()
    section = text.partition("## Where it differs from Triton")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows[2:] == [f"| {row.what} | {row.triton} | {row.ours} | {row.why} |" for row in DIFFERENCES]
