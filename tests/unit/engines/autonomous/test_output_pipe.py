"""From the thread that follows an engine to the engine core's: one wake-up for everything that has come."""

from __future__ import annotations

import select

import pytest

from penstock.engines.autonomous.output_pipe import OutputPipe
from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens


@pytest.fixture
def pipe():
    pipe = OutputPipe()
    yield pipe
    pipe.close()


def rings(pipe):
    return bool(select.select([pipe.wakeup], [], [], 0)[0])


def test_one_fetch_takes_everything_and_silences_the_bell(pipe):
    assert not rings(pipe)
    for request in (1, 2, 3):
        pipe.put(BatcherOutput([NewTokens(request, [5])], [request + 10]))
    pipe.ring()
    assert rings(pipe)
    made = pipe.fetch()
    assert [new.id for new in made.tokens] == [1, 2, 3]
    assert made.released == [11, 12, 13]
    assert not rings(pipe)
    assert pipe.fetch() == BatcherOutput()


def test_a_failure_comes_last_and_rings_for_ever(pipe):
    pipe.put(BatcherOutput([NewTokens(1, [5])]))
    pipe.fail(RuntimeError("first"))
    pipe.fail(RuntimeError("second"))
    assert len(pipe.fetch().tokens) == 1
    for _ in range(2):
        assert rings(pipe)
        with pytest.raises(RuntimeError, match="first"):
            pipe.fetch()


def test_what_comes_after_the_end_is_dropped():
    pipe = OutputPipe()
    pipe.close()
    pipe.put(BatcherOutput([NewTokens(1, [5])]))
    pipe.fail(RuntimeError("late"))


def test_counts_add_up_and_wait_for_tokens(pipe):
    pipe.put(BatcherOutput(num_scheduled_tokens=4))
    pipe.put(BatcherOutput(num_scheduled_tokens=3, num_preemptions=1))
    assert not rings(pipe)
    pipe.put(BatcherOutput([NewTokens(1, [5])], [], 2, 1))
    assert rings(pipe)
    assert pipe.fetch() == BatcherOutput([NewTokens(1, [5])], [], 9, 2)
