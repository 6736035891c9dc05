"""Aborts that TensorRT-LLM does not answer; all on a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from penstock.engines.errors import EngineDeadError
from penstock.engines.tensorrt_llm.watchdog import Patience, Watchdog

PROMPT = list(range(10, 50))


class Case:
    """A watchdog of 8 seats at time 0, with requests 1.. that were started at once."""

    def __init__(self, requests: int) -> None:
        self.now = 0.0
        self.dog = Watchdog(8, Patience(), lambda: self.now)
        for request in range(1, requests + 1):
            self.dog.started(request)

    def pass_time(self, seconds: float, active: int | None = None):
        """A second at a time, each with statistics if `active` is given; the verdicts, added up."""
        released, retried, probes = [], [], 0
        for _ in range(int(seconds)):
            self.now += 1
            if active is not None:
                self.dog.sample(active)
            verdict = self.dog.check()
            released += verdict.released
            retried += verdict.retry
            probes += verdict.probe
        return released, retried, probes


def test_an_abort_that_is_answered_needs_nothing():
    case = Case(2)
    case.dog.aborted(1)
    case.pass_time(3, active=2)
    case.dog.ended(1)
    assert case.pass_time(40, active=1) == ([], [], 0)


def test_an_overdue_abort_is_tried_again_and_again():
    case = Case(2)
    case.dog.aborted(1)
    released, retried, _ = case.pass_time(16, active=2)
    assert (released, retried) == ([], [1, 1, 1])
    assert case.dog.counters.retried == 3


def test_a_seat_comes_free_when_the_statistics_say_so():
    case = Case(3)
    case.dog.aborted(2)
    released, retried, _ = case.pass_time(8, active=2)
    assert (released, retried) == ([2], [])
    assert case.dog.counters.released == 1
    assert case.pass_time(30, active=2)[0] == []


def test_only_as_many_seats_as_are_missing_and_the_oldest_first():
    case = Case(4)
    case.dog.aborted(3)
    case.now += 1
    case.dog.aborted(1)
    assert case.pass_time(20, active=3)[0] == [3]


def test_one_sample_is_not_believed():
    case = Case(2)
    case.dog.aborted(1)
    case.pass_time(4, active=2)
    case.dog.sample(1)
    case.dog.sample(2)
    assert case.pass_time(4, active=2)[0] == []


def test_statistics_must_say_so_for_a_while():
    case = Case(2)
    case.dog.aborted(1)
    case.pass_time(9, active=2)
    assert case.pass_time(2, active=1)[0] == []
    assert case.pass_time(1, active=1)[0] == [1]


def test_running_requests_are_never_released():
    case = Case(3)
    case.dog.aborted(1)
    assert case.pass_time(30, active=0)[0] == [1]


def test_new_requests_that_statistics_cannot_know_do_not_count():
    case = Case(2)
    case.dog.aborted(1)
    released = []
    for request in range(10, 40):
        case.dog.started(request)
        released += case.pass_time(1, active=2)[0]
        case.dog.ended(request)
    assert released == []


def test_statistics_of_a_full_engine_say_nothing():
    case = Case(9)
    case.dog.aborted(1)
    assert case.pass_time(30, active=8)[0] == []


def test_too_many_lost_seats_end_the_engine():
    case = Case(4)
    for request in (1, 2):
        case.dog.aborted(request)
    case.pass_time(100, active=4)
    case.dog.aborted(3)
    with pytest.raises(EngineDeadError, match="keeps 3 of 8 seats"):
        case.pass_time(100, active=4)


def test_a_probe_when_nothing_but_overdue_aborts_is_left():
    case = Case(2)
    case.dog.aborted(1)
    assert case.pass_time(20, active=None)[2] == 0  # the other one runs
    case.dog.ended(2)
    assert case.pass_time(4) == ([], [], 0)
    assert case.pass_time(1)[2] == 1
    case.dog.probe_started()
    assert case.pass_time(3)[2] == 0
    assert case.dog.probe_ended() == [1]
    assert not case.dog.is_busy


def test_a_probe_says_nothing_of_an_abort_that_came_after_it():
    case = Case(1)
    case.dog.aborted(1)
    case.pass_time(5)
    case.dog.probe_started()
    case.dog.started(2)
    case.dog.aborted(2)
    case.now += 30
    assert case.dog.probe_ended() == [1]


# -- over the stand-in


def advance(engine, seconds, until=None):
    """Moves the clock a second at a time, as the engine looks at it, until a condition holds."""
    looked = threading.Event()
    dog = engine.batcher.watchdog
    check = dog.check

    def check_and_tell():
        try:
            return check()
        finally:
            looked.set()

    dog.check = check_and_tell
    for _ in range(seconds):
        if until is not None and until():
            return
        engine.clock.now += 1
        looked.clear()
        assert looked.wait(10)
        engine.take(engine.batcher.step())
    if until is not None:
        engine.wait(until, 1)


def test_an_abort_that_is_ignored_is_repeated_until_it_is_heard(make):
    engine = make({"abort": "ignored"})
    request = engine.start(PROMPT, 470)
    engine.wait(lambda: engine.tokens[request])
    engine.llm.faults.hangs = True
    engine.batcher.abort([request])
    advance(engine, 20, lambda: engine.llm.aborts >= 3)
    assert engine.released == []
    engine.llm.faults.abort = "obeyed"
    engine.llm.faults.hangs = False
    advance(engine, 20, lambda: engine.released)
    assert engine.released == [request]
    assert engine.batcher.watchdog.counters.retried >= 2


def test_forgotten_requests_among_others_come_free_by_the_statistics(make):
    engine = make({"abort": "forgotten"}, num_blocks=1000, max_model_len=30000)
    lost, runs = engine.start(PROMPT, 20000), engine.start([*PROMPT, 1], 20000)
    engine.wait(lambda: engine.tokens[lost] and engine.tokens[runs])
    engine.batcher.abort([lost])
    advance(engine, 30, lambda: engine.released)
    assert engine.released == [lost]
    assert engine.batcher.watchdog.counters.released == 1
    assert runs not in engine.ends


def test_a_forgotten_request_alone_comes_free_by_a_probe(make):
    engine = make({"abort": "forgotten"})
    request = engine.start(PROMPT, 400)
    engine.wait(lambda: engine.tokens[request])
    engine.batcher.abort([request])
    advance(engine, 30, lambda: engine.released)
    assert engine.released == [request]
    again = engine.start(PROMPT, 4)
    engine.finish(again)


def test_late_statistics_do_no_harm(make):
    engine = make()
    engine.llm.faults.mute = True
    ids = [engine.start([*PROMPT, n], 12) for n in range(8)]
    engine.finish(*ids)
    engine.llm.faults.mute = False
    request = engine.start(PROMPT, 4)
    engine.finish(request)
    assert engine.released == []
    assert engine.batcher.num_free_blocks == 24
