"""Live, slow or hung: by silence, by what a step takes, and by what it was expected to take."""

from __future__ import annotations

import asyncio
import os
from io import FileIO

import pytest

from penstock.engines.contract.core import Core
from penstock.engines.contract.messages import Heartbeat
from penstock.engines.process.heartbeat import HeartbeatPipe, HeartbeatThread
from penstock.engines.process.liveness import EngineHealth, Liveness, WatchdogConfig

CONFIG = WatchdogConfig(ready_timeout=10, slow_factor=3, timeout=60, hung_factor=10)
NOW = 1000.0


def after(*beats: Heartbeat, config: WatchdogConfig = CONFIG) -> Liveness:
    liveness = Liveness(config, NOW)
    for beat in beats:
        liveness.beat(beat, NOW)
    return liveness


@pytest.mark.parametrize(
    ("step_seconds", "expected_seconds", "health"),
    [
        (0, None, EngineHealth.LIVE),
        (9.9, None, EngineHealth.LIVE),
        (10, None, EngineHealth.SLOW),
        (59.9, None, EngineHealth.SLOW),
        (60, None, EngineHealth.HUNG),
        (9.9, 0.02, EngineHealth.LIVE),  # short steps do not shorten the bounds
        (59.9, 0.02, EngineHealth.SLOW),
        (60, 0.02, EngineHealth.HUNG),
        (10, 3, EngineHealth.SLOW),
        (29.9, 10, EngineHealth.LIVE),  # expected to take long: both bounds grow with it
        (30, 10, EngineHealth.SLOW),
        (99.9, 10, EngineHealth.SLOW),
        (100, 10, EngineHealth.HUNG),
        (80, 30, EngineHealth.LIVE),  # ready although it is beyond the timeout
    ],
)
def test_a_step_is_measured_by_what_was_expected(
    step_seconds: float, expected_seconds: float | None, health: EngineHealth
) -> None:
    assert after(Heartbeat(step_seconds, expected_seconds)).judge(NOW) is health


@pytest.mark.parametrize(
    ("beats", "silence", "health"),
    [
        ((), 9.9, EngineHealth.LIVE),
        ((), 10, EngineHealth.SLOW),
        ((), 60, EngineHealth.HUNG),
        ((Heartbeat(5, None),), 59.9, EngineHealth.SLOW),
        ((Heartbeat(5, None),), 60, EngineHealth.HUNG),
        ((Heartbeat(5, 10),), 29.9, EngineHealth.LIVE),  # the step may have taken the interpreter's lock
        ((Heartbeat(5, 10),), 100, EngineHealth.HUNG),
        ((Heartbeat(5, 10), Heartbeat(0, None)), 60, EngineHealth.HUNG),  # that step is over
    ],
)
def test_silence_is_measured_by_the_same_bounds(
    beats: tuple[Heartbeat, ...], silence: float, health: EngineHealth
) -> None:
    assert after(*beats).judge(NOW + silence) is health


def test_heartbeats_alone_are_no_progress_and_any_message_breaks_the_silence() -> None:
    liveness = after()
    for second in range(60):
        liveness.beat(Heartbeat(second, None), NOW + second)
    assert liveness.judge(NOW + 60) is EngineHealth.SLOW
    liveness.beat(Heartbeat(60, None), NOW + 60)
    assert liveness.judge(NOW + 60) is EngineHealth.HUNG
    quiet = after()
    quiet.heard(NOW + 59)
    assert quiet.judge(NOW + 60) is EngineHealth.LIVE


def test_a_steps_result_is_progress_before_the_next_heartbeat_says_so() -> None:
    liveness = after(Heartbeat(30, None))
    assert liveness.judge(NOW) is EngineHealth.SLOW
    liveness.stepped()
    assert liveness.judge(NOW) is EngineHealth.LIVE


def test_the_complaint_names_what_was_waited_for() -> None:
    assert after().complaint(NOW + 70) == "it gave no sign of life for 70.0 s"
    assert after(Heartbeat(70, None)).complaint(NOW) == "its step has taken 70.0 s (nothing was expected)"
    assert after(Heartbeat(400, 30)).complaint(NOW) == "its step has taken 400.0 s (30.0 s were expected)"
    assert after(Heartbeat(70, 0.005)).complaint(NOW) == "its step has taken 70.0 s (0.005 s were expected)"


def test_heartbeats_keep_step_with_short_bounds() -> None:
    assert WatchdogConfig().heartbeat_interval == 1.0
    assert WatchdogConfig(ready_timeout=2).heartbeat_interval == 0.5
    assert WatchdogConfig(timeout=2).heartbeat_interval == 0.5
    assert WatchdogConfig(ready_timeout=1e-9).heartbeat_interval == 0.05


async def test_a_heartbeat_that_is_cut_in_two_is_put_together() -> None:
    """By a read from a pipe that holds more than is read at once."""
    seen: asyncio.Queue[Heartbeat] = asyncio.Queue()
    reading, writing = os.pipe()
    pipe = HeartbeatPipe(FileIO(reading), seen.put_nowait)
    async with asyncio.timeout(5):
        os.write(writing, b"[1.0,null]\n[2.0,null]\n[3.")
        assert await seen.get() == Heartbeat(2.0, None)
        os.write(writing, b"0,null]\n")
        assert await seen.get() == Heartbeat(3.0, None)
    pipe.close()
    os.close(writing)


# -- what a heartbeat says


class StubCore(Core):
    quiet_since = None
    expected_seconds = None


@pytest.mark.parametrize(
    ("step_began", "quiet_since", "seconds"),
    [(None, None, 0), (93, None, 7), (None, 90, 10), (93, 90, 10), (90, 93, 10)],
)
def test_a_heartbeat_tells_the_longer_of_step_and_work_beside_it(
    step_began: float | None, quiet_since: float | None, seconds: float
) -> None:
    clock = [0.0]
    reader, writer = os.pipe()
    heart = HeartbeatThread(writer, 1.0, lambda: clock[0])
    os.close(reader)
    os.close(writer)
    assert heart.now() == Heartbeat(0, None), "while the model is loaded"
    heart.core = core = StubCore()
    core.quiet_since, core.expected_seconds = quiet_since, 2.5
    if step_began is not None:
        clock[0] = step_began
        heart.step_begins()
    clock[0] = 100
    assert heart.now() == Heartbeat(seconds, 2.5)
    heart.step_ends()
    assert heart.now().step_seconds == (0 if quiet_since is None else 100 - quiet_since)


async def test_heartbeats_go_on_where_one_cannot_be_said_and_the_newest_counts() -> None:
    class Changing(StubCore):
        num_asked = 0

        @property
        def expected_seconds(self) -> float | None:
            self.num_asked += 1
            if self.num_asked % 2 == 0:
                raise RuntimeError("deque mutated during iteration")
            return float(self.num_asked)

    seen: asyncio.Queue[Heartbeat] = asyncio.Queue()
    reading, writing = os.pipe()
    pipe = HeartbeatPipe(FileIO(reading), seen.put_nowait)
    heart = HeartbeatThread(writing, 0.001, lambda: 0.0)
    heart.core = Changing()
    heart.start()
    async with asyncio.timeout(30):
        told = [(await seen.get()).expected_seconds for _ in range(3)]
    pipe.close()  # the thread ends by itself
    assert told == sorted(told)
    assert all(seconds is not None and seconds % 2 == 1 for seconds in told)
    heart.core = Changing()
    assert [heart.now().expected_seconds for _ in range(2)] == [1, 1], "a client at the door asks, too"
