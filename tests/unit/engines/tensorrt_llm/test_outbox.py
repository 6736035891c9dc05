"""From the thread that follows TensorRT-LLM to the engine core's: one wake-up for everything that has come."""

from __future__ import annotations

import asyncio
import select
from types import SimpleNamespace

import pytest

from penstock.engines.autonomous.messages import BatcherOutput, NewTokens
from penstock.engines.tensorrt_llm.outbox import Outbox
from penstock.engines.tensorrt_llm.stats import Sample
from penstock.engines.tensorrt_llm.watchdog import Patience, Watchdog


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


@pytest.mark.usefixtures("package")
async def test_what_is_ready_together_leaves_together():
    from penstock.engines.tensorrt_llm.streams import Streams

    puts: list[BatcherOutput] = []
    outbox = SimpleNamespace(put=puts.append)
    streams = Streams(None, outbox, Watchdog(8, Patience(), lambda: 0.0), {}, 1.0)
    for request in (1, 2, 3):
        streams._emit(NewTokens(request, [5]))
    assert puts == []
    await asyncio.sleep(0)
    assert [[new.id for new in made.tokens] for made in puts] == [[1, 2, 3]]


@pytest.mark.usefixtures("package")
def test_blocks_that_came_free_ring_for_those_that_wait():
    from penstock.engines.tensorrt_llm.streams import Streams

    rung: list[int] = []
    streams: Streams
    outbox = SimpleNamespace(ring=lambda: rung.append(streams.num_free_blocks))
    streams = Streams(None, outbox, Watchdog(8, Patience(), lambda: 0.0), {}, 1.0)
    for free in (3, 2, 2, 7):
        streams._take_sample(Sample(num_active=1, num_blocks=9, num_free_blocks=free, block_size=32))
    assert rung == [3, 7]
