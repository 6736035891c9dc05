"""What an engine process sends when: tokens may wait a moment, first tokens and ends never do, and nothing is lost."""

from __future__ import annotations

import pytest

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    CallReply,
    FinishReason,
    PromptInfo,
    RequestError,
    RequestOutput,
    StepOutputs,
    StepRecord,
)
from penstock.engines.process.worker import Publisher


class Line:
    """A publisher on a clock that the test moves."""

    def __init__(self, interval: float = 0.010) -> None:
        self.now = 100.0
        self.sent: list[StepOutputs] = []
        self.publisher = Publisher(self.sent.append, interval, lambda: self.now)

    def step(self, *outputs: RequestOutput, after: float = 0.001) -> None:
        self.now += after
        self.publisher.add(StepOutputs(list(outputs), EngineStats(), [StepRecord(after, len(outputs), len(outputs))]))


def token(number: int, request: int = 1) -> RequestOutput:
    return RequestOutput(request, [number])


def test_short_steps_leave_together_and_in_order():
    line = Line()
    for number in range(25):
        line.step(token(number))
    assert [[o.token_ids[0] for o in message.outputs] for message in line.sent] == [
        list(range(10)),
        list(range(10, 20)),
    ]
    assert [len(message.steps) for message in line.sent] == [10, 10]
    assert line.publisher.holds_back


def test_long_steps_leave_at_once():
    line = Line()
    for number in range(3):
        line.step(token(number), after=0.02)
    assert len(line.sent) == 3
    assert not line.publisher.holds_back


def test_without_an_interval_each_step_is_a_message():
    line = Line(interval=0.0)
    for number in range(3):
        line.step(token(number))
    assert len(line.sent) == 3


@pytest.mark.parametrize(
    "urgent",
    [
        RequestOutput(2, [9], prompt=PromptInfo(0, 0.0)),
        RequestOutput(2, [9], FinishReason.STOP),
        RequestOutput(2, [], FinishReason.ERROR, error=RequestError("queue_full", "full")),
    ],
)
def test_first_tokens_and_ends_do_not_wait_and_take_the_rest_along(urgent):
    line = Line()
    line.step(token(1))
    assert line.sent == []
    line.step(token(2), urgent)
    assert [message.outputs for message in line.sent] == [[token(1), token(2), urgent]]


def test_a_flush_sends_what_is_held_back_once():
    line = Line()
    line.step(token(1))
    line.publisher.flush(EngineStats(num_running=3))
    line.publisher.flush(EngineStats())
    assert [message.outputs for message in line.sent] == [[token(1)], []]
    assert line.sent[0].stats.num_running == 3


def test_replies_do_not_wait_either():
    line = Line()
    line.step(token(1))
    line.publisher.add(StepOutputs([], EngineStats(), replies=[CallReply(3)]))
    assert [(message.outputs, message.replies) for message in line.sent] == [([token(1)], [CallReply(3)])]
    line.publisher.flush(EngineStats())
    assert line.sent[1].replies == []


def test_how_long_the_next_message_may_take():
    line = Line()
    assert line.publisher.patience(1.0) == pytest.approx(1.0)
    line.step(token(1), after=0.004)
    assert line.publisher.patience(1.0) == pytest.approx(0.006)
    line.now += 1
    assert line.publisher.patience(1.0) == 0
    line.publisher.flush(EngineStats())
    assert line.publisher.patience(1.0) == pytest.approx(1.0)
