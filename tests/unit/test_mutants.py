"""The bugs made by hand, against which the tests are run now and then (tests/mutants), fit the code as it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from mutants.run import ROOT, Mutant, mutants

MUTANTS = mutants()


@cache
def source_of(file: str) -> str:
    return (ROOT / file).read_text()


def test_a_mutant_is_a_change_in_one_place() -> None:
    assert [problem for mutant in MUTANTS for problem in problems(mutant)] == []


def problems(mutant: Mutant) -> Iterator[str]:
    source = source_of(mutant.file)
    try:
        if mutant.applied(source) == source:
            yield f"{mutant.name}: no change"
    except ValueError as error:
        yield str(error)
    if not mutant.tests or not all((ROOT / "tests" / test).is_file() for test in mutant.tests):
        yield f"{mutant.name}: no tests, or they are not there"


def test_names_are_unmistakable() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_place_that_is_not_there_once_is_an_error() -> None:
    mutant = Mutant("m", "f", "old", "new", [])
    assert mutant.applied("an old one") == "an new one"
    for source in ("nothing", "old and old"):
        with pytest.raises(ValueError, match="m: f has its text"):
            mutant.applied(source)
