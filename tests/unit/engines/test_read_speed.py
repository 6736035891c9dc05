"""Memory is read as often as is told, by as many threads."""

from __future__ import annotations

import pytest

from penstock.engines.host import read_speed
from penstock.engines.host.read_speed import read_speeds


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_by_seconds(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(read_speed, "available_memory", lambda: 1 << 30)
    ticks = iter(range(100))
    # each look at this clock is a second later: one reading is enough
    assert read_speeds(1000, threads, 4, clock=lambda: float(next(ticks))) == [1000.0] * 4


def test_no_more_is_taken_than_a_quarter_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_speed, "available_memory", lambda: 4000)
    ticks = iter(range(100))
    assert read_speeds(1 << 40, 1, 1, clock=lambda: float(next(ticks))) == [1000.0]
