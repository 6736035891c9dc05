"""The comparison itself: what it lets pass, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from differential.compare import differences, unexpected
from differential.differences import ANY, MISSING, Difference, Shown


def table(**fields: tuple[Any, Any]) -> list[Difference]:
    return [Difference("row", "", "", "", "", (Shown(("a *",), fields),))]


def test_types_count() -> None:
    triton = {"a": 1, "b": [1.0, True], "c": "x"}
    ours = {"a": 1.0, "b": [1.0, 1], "d": "x"}
    assert list(differences(triton, ours)) == [
        ("a", 1, 1.0),
        ("b.1", True, 1),
        ("c", "x", MISSING),
        ("d", MISSING, "x"),
    ]


def test_lists_of_different_lengths_differ_as_a_whole() -> None:
    assert list(differences([1, 2], [1])) == [("", [1, 2], [1])]


def test_what_the_table_says_may_differ() -> None:
    assert unexpected("a case", {"status": 500}, {"status": 400}, table(status=(500, 400))) == []
    assert unexpected("a case", {"text": "from Triton"}, {"text": "x"}, table(text=("* Triton", ANY))) == []


@pytest.mark.parametrize(
    ("case", "triton", "ours"),
    [
        ("a case", {"status": 500}, {"status": 404}),
        ("a case", {"status": 400}, {"status": 400}),
        ("a case", {"status": 500, "more": 1}, {"status": 400}),
        ("another case", {"status": 500}, {"status": 400}),
    ],
    ids=["another value", "no difference", "a second difference", "another case"],
)
def test_anything_else_may_not(case: str, triton: Any, ours: Any) -> None:
    assert unexpected(case, triton, ours, table(status=(500, 400))) != []
