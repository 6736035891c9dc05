"""From the thread that follows an engine to the engine core's: one wake-up for everything that has come."""

from __future__ import annotations

import select

import pytest

from penstock.engines.autonomous.outbox import Outbox
from penstock.engines.contract.batcher import BatcherOutput, NewTokens


@pytest.fixture
def outbox():
    outbox = Outbox()
    yield outbox
    outbox.close()


def rings(outbox):
    return bool(select.select([outbox.wakeup], [], [], 0)[0])


def test_one_fetch_takes_everything_and_silences_the_bell(outbox):
    assert not rings(outbox)
    for request in (1, 2, 3):
        outbox.put(BatcherOutput([NewTokens(request, [5])], [request + 10]))
    outbox.ring()
    assert rings(outbox)
    made = outbox.fetch()
    assert [new.id for new in made.tokens] == [1, 2, 3]
    assert made.released == [11, 12, 13]
    assert not rings(outbox)
    assert outbox.fetch() == BatcherOutput()


def test_a_failure_comes_last_and_rings_for_ever(outbox):
    outbox.put(BatcherOutput([NewTokens(1, [5])]))
    outbox.fail(RuntimeError("first"))
    outbox.fail(RuntimeError("second"))
    assert len(outbox.fetch().tokens) == 1
    for _ in range(2):
        assert rings(outbox)
        with pytest.raises(RuntimeError, match="first"):
            outbox.fetch()


def test_what_comes_after_the_end_is_dropped():
    outbox = Outbox()
    outbox.close()
    outbox.put(BatcherOutput([NewTokens(1, [5])]))
    outbox.fail(RuntimeError("late"))


def test_counts_add_up_and_wait_for_tokens(outbox):
    outbox.put(BatcherOutput(num_scheduled_tokens=4))
    outbox.put(BatcherOutput(num_scheduled_tokens=3, num_preemptions=1))
    assert not rings(outbox)
    outbox.put(BatcherOutput([NewTokens(1, [5])], [], 2, 1))
    assert rings(outbox)
    assert outbox.fetch() == BatcherOutput([NewTokens(1, [5])], [], 9, 2)
