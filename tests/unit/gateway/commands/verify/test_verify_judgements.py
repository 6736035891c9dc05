"""What `penstock verify` makes of single answers and results, and the page."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.commands.bench.figures import Machine
from penstock.gateway.commands.verify.answer_checks import conforms, repeats
from penstock.gateway.commands.verify.prompts import CALLS, JSON_ANSWERS
from penstock.gateway.commands.verify.report import Notes, Result, Row, VerifyReport, page
from penstock.gateway.commands.verify.text_checks import plain

MACHINE = Machine(
    date="2026-01-01", cpu="a CPU", cores=2, load_average=0.0, os="Linux", python="3.11", packages={"penstock": "1"}
)
PERSON: Any = JSON_ANSWERS[0][0]
TASK: Any = JSON_ANSWERS[2][0]
LISTED: Any = JSON_ANSWERS[3][0]
NESTED: Any = JSON_ANSWERS[4][0]


def report(*results: Result, **settings: Any) -> VerifyReport:
    rows = [Row(f"check {number}", result, "so it is") for number, result in enumerate(results)]
    return VerifyReport(machine=MACHINE, model="m", runner="an engine", settings=settings, rows=rows, seconds=3.2)


@pytest.mark.parametrize(
    ("results", "verdict", "failed"),
    [
        (("pass", "skipped"), "m works (1 pass, 1 skipped; 3 s)", False),
        (("warn", "pass"), "m works, with warnings: check 0 (1 pass, 1 warn; 3 s)", False),
        (("warn", "pass", "FAIL"), "m does not work here: check 2 (1 pass, 1 warn, 1 FAIL; 3 s)", True),
    ],
)
def test_the_verdict_is_that_of_the_worst_row(results: tuple[Result, ...], verdict: str, failed: bool) -> None:
    found = report(*results)
    assert page(found).splitlines()[-1] == verdict
    assert found.failed is failed


def test_a_page_names_the_settings_and_breaks_long_rows() -> None:
    found = report("pass", weights="int4")
    found.rows.append(Row("c", "warn", "word " * 50))
    lines = page(found).splitlines()
    assert "settings: weights=int4" in lines
    assert max(map(len, lines)) <= 118
    begin = next(line for line in lines if "warn" in line and "word" in line).index("word")
    assert all(line[begin:].startswith("word") for line in lines if "word" in line)


def test_a_row_has_the_worst_result_and_its_reason_first() -> None:
    notes = Notes("a check")
    notes.add("pass", "good")
    notes.add("FAIL", "bad")
    notes.add("warn", "odd")
    assert notes.row(number=1) == Row("a check", "FAIL", "bad; odd; good", {"number": 1})


@pytest.mark.parametrize(
    ("token_ids", "result"),
    [
        ([], False),
        ([1, 2, 3, 4, 5, 6, 7, 8], False),
        ([9] * 4, False),
        ([5, 6, *[9] * 20], True),
        ([1, 2, 3, 4, *[5, 6, 7] * 12], True),
        ([*[5, 6, 7] * 12, 1, 2, 3, 4], False),
    ],
)
def test_answers_that_repeat_themselves(token_ids: list[int], result: bool) -> None:
    assert repeats(token_ids) is result


@pytest.mark.parametrize(
    ("value", "schema", "result"),
    [
        ({"name": "Ada", "age": 36}, PERSON, True),
        ({"name": "Ada"}, PERSON, False),
        ({"name": "Ada", "age": 36, "more": 1}, PERSON, False),
        ({"name": "Ada", "age": 36.5}, PERSON, False),
        ({"name": "Ada", "age": True}, PERSON, False),
        ({"name": "Ada", "age": 121}, PERSON, False),
        ({"name": "x" * 41, "age": 1}, PERSON, False),
        (["Ada", 36], PERSON, False),
        ({"title": "a", "done": 0, "priority": "low"}, TASK, False),
        ({"title": "a", "done": False, "priority": "lowest"}, TASK, False),
        ({"title": "a", "done": False, "priority": "low"}, TASK, True),
        ({"items": []}, LISTED, False),
        ({"items": ["a", "b", "c"]}, LISTED, True),
        ({"items": ["a", 1]}, LISTED, False),
        ({"product": {"name": "a", "price": 2}, "in_stock": True}, NESTED, True),
        ({"product": {"name": "a"}, "in_stock": True}, NESTED, False),
    ],
)
def test_values_that_conform(value: Any, schema: dict[str, Any], result: bool) -> None:
    assert conforms(value, schema) is result


def test_the_built_in_prompts_can_be_answered() -> None:
    """What is expected is what is accepted."""
    assert len(CALLS) == len(JSON_ANSWERS) == 25
    assert all(conforms(arguments, tool["function"]["parameters"]) for tool, _, arguments in CALLS)
    assert len({tool["function"]["name"] for tool, _, _ in CALLS[:5]}) == 5


def test_what_tokenizers_change_on_purpose_is_no_change() -> None:
    assert plain(" e\u0301  fi\n") == plain("\u00e9 \ufb01")
    assert plain("a b") != plain("ab")
