"""Wake-ups at their time, once, at the latest time that was set."""

from __future__ import annotations

import asyncio
import sys
from time import monotonic_ns

import pytest

from penstock.classic.batching.fine_timer import FineTimer

pytestmark = pytest.mark.parametrize("platform", [sys.platform, "other"])
MILLISECOND = 1_000_000


class Woken:
    def __init__(self) -> None:
        self.times: list[int] = []
        self.event = asyncio.Event()

    def __call__(self) -> None:
        self.times.append(monotonic_ns())
        self.event.set()

    async def once(self) -> int:
        await asyncio.wait_for(self.event.wait(), 10)
        self.event.clear()
        return self.times[-1]


@pytest.fixture
async def timed(platform: str, monkeypatch: pytest.MonkeyPatch):
    """With timerfd where there is one, and with the loop's own timers."""
    monkeypatch.setattr(sys, "platform", platform)
    woken = Woken()
    timer = FineTimer(asyncio.get_running_loop(), woken)
    yield timer, woken
    timer.close()


async def test_never_too_early(timed) -> None:
    timer, woken = timed
    for delay in (0, 50_000, 300_000, 5 * MILLISECOND):
        due = monotonic_ns() + delay
        timer.set(due)
        # clocks of loops may be a tick behind
        assert await woken.once() >= due - MILLISECOND
    assert len(woken.times) == 4


async def test_a_time_in_the_past_is_now(timed) -> None:
    timer, woken = timed
    timer.set(1)
    await woken.once()
    timer.set(-5)
    await woken.once()


async def test_the_last_time_counts(timed) -> None:
    timer, woken = timed
    begun = monotonic_ns()
    timer.set(begun + 3_600_000 * MILLISECOND)
    timer.set(begun + 2 * MILLISECOND)
    await woken.once()
    assert len(woken.times) == 1


async def test_nothing_after_it_is_closed(timed) -> None:
    timer, woken = timed
    timer.set(monotonic_ns() + 2 * MILLISECOND)
    timer.close()
    timer.close()
    later, other = asyncio.get_running_loop().create_future(), Woken()
    asyncio.get_running_loop().call_later(0.02, later.set_result, None)
    await later
    assert woken.times == other.times == []
