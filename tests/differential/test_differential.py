"""The same requests to Triton and to us: the answers are the same, but for the table in differences.py."""

from __future__ import annotations

from collections import Counter

import pytest

from differential import cases_http
from differential.compare import unexpected
from differential.differences import DIFFERENCES
from differential.observe import Case
from differential.peers import Pair

CASES = [*cases_http.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_answer(case: Case, explicit: Pair) -> None:
    problems = unexpected(case.name, case.run(explicit.triton), case.run(explicit.ours), DIFFERENCES)
    assert not problems, "\n".join(problems)


def test_cases_have_names_of_their_own() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
