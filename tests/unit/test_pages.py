"""README.md, SECURITY.md and the pages of docs/: what they name exists, and they stay short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks.figures.main import pages, read

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
WORKSHOP = re.compile(
    r"\b(first|second|third) edition\b|\baims?\b.{0,20}\bmiss|\bmiss\w* (its|the|an) aim|\bissue \d+", re.I
)
"""Words of those who make the project, not of its users."""


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
        linked = re.findall(r"\]\(([^)#]+)", evidence)
        assert tests or linked, evidence
        assert [name for name in tests if not exists(name)] == []
        assert [name for name in linked if not (ROOT / page).parent.joinpath(name).is_file()] == []


def exists(name: str) -> bool:
    path, _, test = name.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and (
        not test or re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE) is not None
    )


def anchors(page: Path) -> set[str]:
    """Those of the headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = (re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", head) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        file = page.parent / unquote(target) if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 12 << 10


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_pages_are_short_and_of_the_site(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 400
    assert f"- {page.name}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_users_read_nothing_of_the_workshop(page: Path) -> None:
    assert WORKSHOP.findall(page.read_text()) == []


def test_figures_are_those_of_the_data() -> None:
    """Else: python loadtest/benchmarks figures."""
    figures = read()
    assert {name: (ROOT / name).read_text() for name in pages(figures)} == pages(figures)
    assert sum(bool(row.text) for row in figures.readme) == 8, "the README is short"
    named = {name for table in figures.table for name in table.code}
    assert [path for name in named for path in figures.paths[name] if not (ROOT / path).exists()] == []
