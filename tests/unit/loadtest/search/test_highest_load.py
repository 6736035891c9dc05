"""The search for the highest value that holds, on functions whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtest.search.find import HighestLoad, HighestLoadSearch, Trial


class Tries:
    """Counts what is tried."""

    def __init__(self, attempt: Callable[[float], Trial]) -> None:
        self.values: list[float] = []
        self._attempt = attempt

    def __call__(self, value: float) -> Trial:
        self.values.append(value)
        return self._attempt(value)


def search(
    attempt: Callable[[float], Trial],
    *,
    start: float = 1.0,
    least: float = 0.01,
    whole: bool = False,
    precision: float = 0.05,
    max_runs: int = 60,
    tries: int = 1,
) -> HighestLoad:
    return HighestLoadSearch(
        attempt, start=start, least=least, whole=whole, precision=precision, max_runs=max_runs, tries=tries
    ).run()


def below(capacity: float) -> Tries:
    return Tries(lambda value: Trial(value <= capacity))


@given(
    capacity=st.floats(0.02, 1e5),
    start=st.floats(0.01, 1e4),
    precision=st.sampled_from([0.02, 0.05, 0.2, 1.0]),
)
def test_the_edge_of_a_monotone_server_is_found(capacity: float, start: float, precision: float) -> None:
    tries = below(capacity)
    found = search(tries, start=start, precision=precision)
    assert found.outcome == "found"
    assert found.held is not None
    assert found.failed is not None
    assert found.held <= capacity < found.failed
    assert found.failed <= found.held * (1 + precision) * 1.02  # values have three digits
    assert found.notes == []
    steps = abs(math.log2(capacity / start)) + math.log2(1 / math.log2(1 + precision))
    assert len(tries.values) <= steps + 6


@given(capacity=st.integers(1, 5000), start=st.integers(1, 5000))
def test_whole_numbers(capacity: int, start: int) -> None:
    tries = below(capacity)
    found = search(tries, start=start, least=1, whole=True)
    assert found.held is not None
    assert found.failed is not None
    assert found.held <= capacity < found.failed
    assert found.failed - found.held <= max(1, 0.05 * found.held)
    assert all(value == int(value) >= 1 for value in tries.values)


@given(capacity=st.floats(5, 500), seed=st.integers(0, 2**32))
def test_noise_moves_the_answer_by_no_more_than_noise(capacity: float, seed: int) -> None:
    """Each run sees another capacity, by up to 5 %."""
    rng = Random(seed)

    def attempt(value: float) -> Trial:
        seen = capacity * rng.uniform(0.95, 1.05)
        return Trial(value <= seen, close=abs(value / seen - 1) < 0.1)

    found = search(attempt)
    assert found.outcome == "found"
    assert found.held is not None
    assert found.failed is not None
    assert found.held < found.failed
    assert found.held <= 1.05 * capacity
    assert found.failed >= 0.95 * capacity
    assert found.failed <= found.held * 1.08


@given(budget=st.integers(1, 40), capacity=st.floats(0.02, 1e4))
def test_there_are_no_more_runs_than_allowed(budget: int, capacity: float) -> None:
    tries = Tries(lambda value: Trial(value <= capacity, close=True))
    found = search(tries, max_runs=budget, tries=2)
    assert len(tries.values) <= budget
    assert found.outcome == "found" or len(tries.values) == budget
    assert found.held is None or found.held <= capacity
    assert found.failed is None or found.failed > capacity


def test_nothing_holds() -> None:
    found = search(lambda value: Trial(False), start=8, least=1, whole=True)
    assert found[:3] == (None, 1, "nothing held")


def test_a_client_at_its_end_ends_the_search() -> None:
    tries = Tries(lambda value: Trial(True, invalid="late" if value > 5 else ""))
    found = search(tries)
    assert found == (4, None, "client-bound", ["8: late"])
    assert tries.values == [1, 2, 4, 8]


def test_a_client_at_its_end_above_the_answer_does_not_spoil_it() -> None:
    """Only the look above the failure is too much for it."""
    found = search(lambda value: Trial(value <= 1.9, invalid="late" if value > 2.2 else ""))
    assert found.outcome == "found"
    assert found.held is not None
    assert found.failed is not None
    assert found.held <= 1.9 < found.failed
    assert len(found.notes) == 1


def test_close_things_are_decided_by_the_best_of_three() -> None:
    outcomes = iter([False, True, True])
    attempt = Tries(lambda value: Trial(next(outcomes), close=True) if value == 4 else Trial(value < 6))
    found = search(attempt)
    assert attempt.values[:6] == [1, 2, 4, 4, 4, 8]
    assert found.held is not None
    assert 4 < found.held < 6


def test_a_lucky_run_does_not_stand() -> None:
    """What held once, by chance, is tried again before it is the answer."""
    lucky = iter([True])
    found = search(lambda value: Trial(value <= 2 or (value == 4 and next(lucky, False))), precision=1.0)
    assert found.held == 2
    assert found.failed == 4


def test_an_unlucky_run_does_not_stand() -> None:
    """What failed once, by chance, is tried again when even more holds."""
    unlucky = iter([False])
    found = search(lambda value: Trial(value <= 20 and (value != 4 or next(unlucky, True))))
    assert found.held is not None
    assert found.failed is not None
    assert found.held <= 20 < found.failed


def test_a_server_that_fails_in_between_is_called_that() -> None:
    """4 fails every time, 5 holds."""
    found = search(lambda value: Trial(value != 4 and value <= 20), precision=0.5)
    assert found.held is not None
    assert found.held < 4
    assert found.failed == 4
    assert ["not monotone" in note for note in found.notes] == [True]


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_each_value_is_tried_so_often(tries: int) -> None:
    seen = below(10)
    search(seen, tries=tries)
    assert all(seen.values.count(value) >= tries for value in seen.values)
