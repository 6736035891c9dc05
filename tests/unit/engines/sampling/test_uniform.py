from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.kit.sampling.uniform import stream_key, uniform


def numbers(seed: int, count: int) -> np.ndarray:
    return np.array([uniform(stream_key(seed), i) for i in range(count)])


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_in_the_unit_interval_whatever_the_seed(seed: int, index: int) -> None:
    value = uniform(stream_key(seed), index)
    assert 0.0 <= value < 1.0
    assert value == uniform(stream_key(seed), index)


def test_known_numbers() -> None:
    """The sequence is part of what a seed promises: it may not change between versions."""
    state, wanted = stream_key(42), []
    for _ in range(4):  # SplitMix64 as it is published, started at the key
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
        wanted.append(((z ^ z >> 31) >> 11) / 2**53)
    assert numbers(42, 4).tolist() == wanted


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_evenly_spread(seed: int) -> None:
    counts = np.histogram(numbers(seed, 20_000), bins=100, range=(0, 1))[0]
    assert ((counts - 200.0) ** 2 / 200.0).sum() < 99 + 5 * np.sqrt(2 * 99)


def test_neighbouring_seeds_are_unrelated() -> None:
    a, b = numbers(7, 5000), numbers(8, 5000)
    for shift in range(4):
        assert abs(np.corrcoef(a[shift:], b[: 5000 - shift])[0, 1]) < 0.06
        assert not np.isin(a, b).any()
