"""docs/triton.md: every row has a test, every test that it names exists, and flags are served or refused as it says."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from differential.test_differential import CASES
from penstock.gateway.configuration.config import OTHER_NAMES, SECTIONS
from penstock.gateway.configuration.triton_flags import TRITON_OLD, TRITON_REFUSED, TRITON_TUNING

TESTS = Path(__file__).parents[1]
COUNTS = re.compile(r"^## Triton's own test programs\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
"""A section whose table counts Triton's tests, not ours."""
TEXT = COUNTS.sub("", (TESTS.parent / "docs/triton.md").read_text(encoding="utf-8"))
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("|") and "---" not in line]
SAME = "differential/test_differential.py::test_same_answer"


def rows() -> Iterator[list[str]]:
    """Without the heads of the tables."""
    return (row for row in ROWS if row[-1] != "shown by")


def test_every_row_names_its_tests() -> None:
    assert [row[0] for row in rows() if len(row) != 3 or not re.fullmatch(r"(`[^`]+\.py[^`]*`\s*)+", row[2])] == []


def test_the_tests_exist() -> None:
    named = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[2])}
    assert [name for name in sorted(named) if not _exists(name)] == []


def _exists(name: str) -> bool:
    path, _, test = name.partition("::")
    test, _, case = test.partition("[")
    file = TESTS / path
    found = file.is_file() and (not test or re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE))
    if case and name.startswith(SAME):
        return bool(found) and any(fnmatchcase(each.name, case.removesuffix("]")) for each in CASES)
    return bool(found) and not case


def test_flags_are_served_or_refused_as_the_table_says() -> None:
    said: dict[str, set[str]] = defaultdict(set)
    for flags, here, _ in rows():
        if flags.startswith("`--"):
            said[here.split()[0].strip(":;,")].update(re.findall(r"`(--[a-z0-9-]+)`", flags))
    settings = {name for section in SECTIONS.values() for name in section.__struct_fields__} | OTHER_NAMES.keys()
    assert said["refused"] == TRITON_REFUSED.keys()
    assert said["no"] == TRITON_TUNING.keys()
    assert said["works"] <= {"--" + name.replace("_", "-") for name in settings} | TRITON_OLD.keys()
    assert TRITON_OLD.keys() <= said["works"]
