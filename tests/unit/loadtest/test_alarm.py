from __future__ import annotations

import asyncio
import sys
from time import perf_counter

import pytest

from penstock.loadtest.alarm import Alarm


@pytest.fixture(params=["linux", "elsewhere"])
async def alarm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Alarm:
    if request.param == "elsewhere":
        monkeypatch.setattr(sys, "platform", "elsewhere")
    return Alarm()


async def test_rings_in_order_and_never_early(alarm: Alarm) -> None:
    rung: list[tuple[str, float]] = []
    done = asyncio.Event()
    now = perf_counter()
    for name, after in (("c", 0.03), ("a", 0.01), ("b", 0.02), ("now", -1.0)):
        alarm.at(now + after, lambda name=name, after=after: rung.append((name, perf_counter() - now - after)))
    alarm.at(now + 0.04, done.set)
    assert not rung, "not while it is being asked"
    await done.wait()
    assert [name for name, _ in rung] == ["now", "a", "b", "c"]
    assert all(late > -1e-4 for _, late in rung)
    alarm.close()


async def test_what_is_added_while_it_rings_rings_too(alarm: Alarm) -> None:
    rung: list[int] = []
    done = asyncio.Event()

    def again() -> None:
        rung.append(len(rung))
        if len(rung) < 5:
            alarm.at(perf_counter(), again)
        else:
            done.set()

    alarm.at(perf_counter() + 0.005, again)
    await done.wait()
    assert rung == [0, 1, 2, 3, 4]
    alarm.close()


async def test_is_silent_once_closed(alarm: Alarm) -> None:
    rung: list[int] = []
    alarm.at(perf_counter() + 0.005, lambda: rung.append(1))
    alarm.close()
    await asyncio.sleep(0.02)
    assert not rung
