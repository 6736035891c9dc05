"""A model that falls asleep and wakes up: nothing that needs it is lost on the way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError, NotReadyError
from penstock.gateway.apis.ollama.generate import keep, seconds_of
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.adapters import CallCounter
from penstock.gateway.models.language.model_sleep import ModelSleep
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.requests.context import RequestContext


class Stage:
    """Stands for an engine that starts and stops when the test says so."""

    def __init__(self, idle_seconds: float = 0.0) -> None:
        self.log: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.problem: EngineError | None = None
        self.calls = CallCounter()
        self.sleep = ModelSleep("m", cast(Any, self), self.calls, idle_seconds)
        self.sleep.begin()

    async def start(self) -> None:
        self.log.append("start")
        await self.go_on.wait()
        if self.problem is not None:
            raise self.problem

    async def stop(self, reason: str) -> None:
        self.log.append("stop")
        await self.go_on.wait()

    async def call(self) -> None:
        with self.calls:
            await self.sleep.awake()
            self.log.append("call")

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.log) < count:
                await asyncio.sleep(0.001)


async def test_one_that_was_put_to_sleep_refuses_until_it_is_woken() -> None:
    stage = Stage()
    await stage.sleep.sleep(wait=False)
    assert stage.sleep.asleep
    assert not stage.sleep.wakes_by_itself
    with pytest.raises(NotReadyError, match="/wake_up"):
        await stage.call()
    await stage.sleep.sleep(wait=False)
    await stage.sleep.wake()
    await stage.sleep.wake()
    await stage.call()
    assert stage.log == ["stop", "start", "call"]


async def test_sleep_may_wait_for_what_runs() -> None:
    stage = Stage()
    with stage.calls:
        falling = asyncio.create_task(stage.sleep.sleep(wait=True))
        await asyncio.sleep(0)
        with pytest.raises(NotReadyError):
            await stage.call()
        assert stage.log == []
    await falling
    assert stage.log == ["stop"]


async def test_an_idle_one_sleeps_and_wakes_once_for_all_that_need_it() -> None:
    stage = Stage(idle_seconds=0.01)
    await stage.until(1)
    assert stage.sleep.wakes_by_itself
    stage.go_on.clear()
    calls = [asyncio.create_task(stage.call()) for _ in range(5)]
    await stage.until(2)
    stage.go_on.set()
    await asyncio.gather(*calls)
    assert stage.log[:7] == ["stop", "start", *["call"] * 5]
    await stage.until(8)
    assert stage.log[7] == "stop"
    await stage.sleep.end()


async def test_a_busy_one_stays_awake() -> None:
    stage = Stage(idle_seconds=0.001)
    with stage.calls:
        await asyncio.sleep(0.02)
        assert stage.log == []
    await stage.until(1)
    await stage.sleep.end()


async def test_one_that_is_busy_in_another_process_stays_awake() -> None:
    stage = Stage(idle_seconds=0.001)
    stage.calls.hold()
    await asyncio.sleep(0.02)
    assert stage.log == []
    stage.calls.release()
    await stage.until(1)
    await stage.sleep.end()


async def test_however_often_it_is_told_to_sleep_it_waits_once_for_the_calls_that_run() -> None:
    stage = Stage(idle_seconds=1000.0)
    with stage.calls:
        for _ in range(5):
            stage.sleep.keep(0.0)
            await asyncio.sleep(0.002)
        assert len(stage.sleep._tasks) == 1
    await stage.until(1)
    await stage.sleep.end()


async def test_a_call_while_it_falls_asleep_wakes_it_again() -> None:
    stage = Stage(idle_seconds=0.001)
    stage.go_on.clear()
    await stage.until(1)
    call = asyncio.create_task(stage.call())
    await asyncio.sleep(0)
    stage.go_on.set()
    await call
    assert stage.log == ["stop", "start", "call"]
    await stage.sleep.end()


async def test_one_that_cannot_start_tells_each_caller_and_is_tried_again() -> None:
    stage = Stage()
    await stage.sleep.sleep(wait=False)
    stage.problem = EngineError("no room")
    with pytest.raises(EngineError, match="no room"):
        await stage.sleep.wake()
    assert stage.sleep.asleep
    with pytest.raises(NotReadyError):
        await stage.call()
    stage.problem = None
    await stage.sleep.wake()
    await stage.call()


async def test_one_failure_is_told_to_all_that_wait() -> None:
    stage = Stage(idle_seconds=0.001)
    await stage.until(1)
    stage.problem = EngineError("no room")
    ends = await asyncio.gather(*(stage.call() for _ in range(5)), return_exceptions=True)
    assert [str(end) for end in ends] == ["no room"] * 5
    assert stage.log == ["stop", "start"]
    stage.problem = None
    await stage.call()
    await stage.sleep.end()


async def test_how_long_it_is_kept_may_change() -> None:
    stage = Stage(idle_seconds=1000.0)
    left = stage.sleep.seconds_left
    assert left is not None
    assert 900 < left <= 1000
    stage.sleep.keep(None)
    assert stage.sleep.seconds_left is None
    stage.sleep.keep(0.0)
    await stage.until(1)
    assert stage.sleep.asleep
    await stage.call()  # what was said is forgotten with the sleep: it does not sleep again behind each call
    left = stage.sleep.seconds_left
    assert left is not None
    assert left > 900
    await stage.sleep.end()


@pytest.mark.parametrize(
    ("given", "seconds"), [(5, 5), ("300", 300), ("5m", 300), ("1h30m", 5400), ("-1", -1), ("-2s", -2), ("250ms", 0.25)]
)
def test_durations_are_seconds_or_texts_with_units(given: float | str, seconds: float) -> None:
    assert seconds_of(given) == seconds


def loaded(stage: Stage) -> LoadedModel:
    return cast(LoadedModel, SimpleNamespace(sleep=stage.sleep, names=("m",)))


@pytest.mark.parametrize("given", ["inf", 1e300, "999999999h", 10**15, -1])
async def test_longer_than_dates_go_is_for_ever(given: float | str) -> None:
    stage = Stage(idle_seconds=60.0)
    keep(Catalogue(), loaded(stage), given, RequestContext())
    assert stage.sleep.seconds_left is None, "else no timer could be set, and no list could show when it sleeps"


async def test_a_duration_is_a_number() -> None:
    with pytest.raises(InvalidRequestError, match="keep_alive"):
        seconds_of("nan")


@pytest.mark.parametrize("given", [0, "0", "0s", "-0"])
async def test_a_model_that_does_not_fall_asleep_stays_and_the_answer_says_so(given: float | str) -> None:
    stage, context = Stage(idle_seconds=0.0), RequestContext()
    keep(Catalogue(), loaded(stage), given, context)
    assert (stage.sleep.seconds_left, context.record.ignored) == (None, ("keep_alive",))
    keep(Catalogue(), loaded(stage), "5m", kept := RequestContext())
    assert kept.record.ignored == ()
