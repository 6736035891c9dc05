"""The encoder's thread: every call ends once, and a text that fails fails alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from penstock.engines.contract.loading import Loading, Report
from penstock.engines.encoder.engine import EncoderEngine, TextQueue
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.engines.errors import NotReadyError, NumericalError, QueueFullError, StepFailedError

BAD, NAN = 66, 67


class FakeEncoder:
    """A text's row is the sum of its tokens. Holds every batch until `gate` is open."""

    info = EncoderInfo(max_tokens=100, vocab_size=100, output_size=1, runner="fake")

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.computing = threading.Event()

    def compute(self, texts: Sequence[TokenizedText]) -> Vectors:
        self.batches.append([list(text.ids) for text in texts])
        self.computing.set()
        assert self.gate.wait(30)
        if any(BAD in text.ids for text in texts):
            raise ValueError("bad text")
        sums = [float("nan") if NAN in text.ids else sum(text.ids) for text in texts]
        return np.array(sums, np.float32)[:, None]


def text(*ids: int) -> TokenizedText:
    return TokenizedText(ids)


@asynccontextmanager
async def running(encoder: FakeEncoder, **bounds: int) -> AsyncIterator[EncoderEngine]:
    queue = TextQueue(**{"max_batched_tokens": 8, "max_requests": 10, "max_tokens": 1000, **bounds})
    engine = EncoderEngine(lambda report: encoder, queue)
    await engine.start()
    try:
        yield engine
    finally:
        encoder.gate.set()
        await engine.stop()


async def hold(encoder: FakeEncoder, engine: EncoderEngine) -> asyncio.Task[Vectors]:
    """A batch of one text is being computed, and stays so until the gate opens."""
    encoder.gate.clear()
    encoder.computing.clear()
    held = asyncio.create_task(engine.encode([text(1)]))
    assert await asyncio.to_thread(encoder.computing.wait, 30)
    return held


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_each_call_gets_its_own_rows_in_order() -> None:
    calls = [[text(n, i) for i in range(n + 1)] for n in range(9)]
    async with running(FakeEncoder()) as engine:
        found = await asyncio.gather(*(engine.encode(call) for call in calls))
        assert [rows[:, 0].tolist() for rows in found] == [[sum(each.ids) for each in call] for call in calls]
        assert engine.waiting == (0, 0)
        assert (engine.stats.texts, engine.stats.tokens) == (45, 90)


async def test_what_came_meanwhile_is_the_next_batch() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        held = await hold(encoder, engine)
        calls = [asyncio.create_task(engine.encode([text(n)])) for n in (2, 3, 4)]
        await until(lambda: engine.waiting[0] == 3)
        encoder.gate.set()
        await asyncio.gather(held, *calls)
    assert encoder.batches == [[[1]], [[2], [3], [4]]]


async def test_only_the_call_with_the_bad_text_fails() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        held = await hold(encoder, engine)
        calls = [asyncio.create_task(engine.encode(texts)) for texts in ([text(2)], [text(3), text(BAD)], [text(NAN)])]
        await until(lambda: engine.waiting[0] == 3)
        encoder.gate.set()
        good, bad, nan = await asyncio.gather(*calls, return_exceptions=True)
        await held
    assert isinstance(good, np.ndarray)
    assert good.tolist() == [[2]]
    assert isinstance(bad, StepFailedError)
    assert "ValueError" in bad.message
    assert "bad text" not in bad.message
    assert isinstance(nan, NumericalError)


async def test_a_call_that_is_given_up_leaves_the_queue() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        held = await hold(encoder, engine)
        given_up = asyncio.create_task(engine.encode([text(2)] * 20))
        await until(lambda: engine.waiting == (1, 20))
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert engine.waiting == (0, 0)
        encoder.gate.set()
        await held
    assert encoder.batches == [[[1]]]


async def test_one_that_is_given_up_in_a_batch_disturbs_nobody() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        held = await hold(encoder, engine)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        after = asyncio.create_task(engine.encode([text(5)]))
        encoder.gate.set()
        assert (await after).tolist() == [[5]]


async def test_a_full_queue_refuses() -> None:
    encoder = FakeEncoder()
    async with running(encoder, max_requests=1) as engine:
        held = await hold(encoder, engine)
        waits = asyncio.create_task(engine.encode([text(2)]))
        await until(lambda: engine.waiting[0] == 1)
        with pytest.raises(QueueFullError) as refused:
            await engine.encode([text(3)])
        assert refused.value.retry_after
        encoder.gate.set()
        await asyncio.gather(held, waits)


async def test_stopping_ends_what_waits() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        held = await hold(encoder, engine)
        waits = asyncio.create_task(engine.encode([text(2)]))
        await until(lambda: engine.waiting[0] == 1)
        stopping = asyncio.create_task(engine.stop())
        for call in (held, waits):
            with pytest.raises(NotReadyError):
                await call
        encoder.gate.set()
        await stopping
        with pytest.raises(NotReadyError):
            await engine.encode([text(3)])
    assert encoder.batches == [[[1]]]


async def test_loading_is_told_on_the_loop() -> None:
    said: list[Any] = []

    def load(report: Report) -> FakeEncoder:
        report(Loading("weights"))
        return FakeEncoder()

    def report(loading: Loading) -> None:
        said.append((loading.stage, threading.current_thread()))

    engine = EncoderEngine(load, TextQueue(8, 8, 8), report)
    with pytest.raises(NotReadyError):
        _ = engine.info
    await engine.start()
    await engine.stop()
    assert said == [("weights", threading.current_thread())]
