from __future__ import annotations

import asyncio
import sys
from time import perf_counter

import pytest

from penstock.loadtest.precise_timer import PreciseTimer


@pytest.fixture(params=["linux", "elsewhere"])
async def timer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreciseTimer:
    if request.param == "elsewhere":
        monkeypatch.setattr(sys, "platform", "elsewhere")
    return PreciseTimer()


async def test_calls_back_in_order_and_never_early(timer: PreciseTimer) -> None:
    called: list[tuple[str, float]] = []
    done = asyncio.Event()
    now = perf_counter()
    for name, after in (("c", 0.03), ("a", 0.01), ("b", 0.02), ("now", -1.0)):
        timer.call_at(now + after, lambda name=name, after=after: called.append((name, perf_counter() - now - after)))
    timer.call_at(now + 0.04, done.set)
    assert not called, "not while it is being asked"
    await done.wait()
    assert [name for name, _ in called] == ["now", "a", "b", "c"]
    assert all(late > -1e-4 for _, late in called)
    timer.close()


async def test_what_is_added_during_a_call_back_is_called_too(timer: PreciseTimer) -> None:
    called: list[int] = []
    done = asyncio.Event()

    def again() -> None:
        called.append(len(called))
        if len(called) < 5:
            timer.call_at(perf_counter(), again)
        else:
            done.set()

    timer.call_at(perf_counter() + 0.005, again)
    await done.wait()
    assert called == [0, 1, 2, 3, 4]
    timer.close()


async def test_is_silent_once_closed(timer: PreciseTimer) -> None:
    called: list[int] = []
    timer.call_at(perf_counter() + 0.005, lambda: called.append(1))
    timer.close()
    await asyncio.sleep(0.02)
    assert not called
