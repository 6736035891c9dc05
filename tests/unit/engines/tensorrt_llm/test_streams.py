"""What the streams put into the output pipe, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens
from penstock.engines.tensorrt_llm.contract import IterationSample
from penstock.engines.tensorrt_llm.watchdog import Patience, Watchdog


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
        streams._take_sample(IterationSample(num_active=1, num_blocks=9, num_free_blocks=free, block_size=32))
    assert rung == [3, 7]
