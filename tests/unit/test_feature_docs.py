"""docs/features.md and SECURITY.md: every row names tests or pages, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows(page: str) -> list[list[str]]:
    """Cells of the tables whose last column is "shown by", without their heads."""
    tables = re.findall(r"^\|.*\| shown by \|\n\|[-|]+\|\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.MULTILINE)
    return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]


@pytest.mark.parametrize(("page", "least"), [("docs/features.md", 70), ("SECURITY.md", 25)])
def test_every_row_names_what_shows_it(page: str, least: int) -> None:
    table = rows(page)
    assert len(table) >= least
    for *_, evidence in table:
        tests = re.findall(r"`([^`]+)`", evidence)
        pages = re.findall(r"\]\(([^)#]+)", evidence)
        assert tests or pages, evidence
        assert [name for name in tests if not exists(name)] == []
        assert [name for name in pages if not (ROOT / page).parent.joinpath(name).is_file()] == []


def exists(name: str) -> bool:
    path, _, test = name.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and (
        not test or re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE) is not None
    )
