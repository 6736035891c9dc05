"""Requests through an engine in this process: from `submit` to the end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from penstock.engines.client.engine import Engine
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestOutput, SamplingParams
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.errors import NotReadyError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from support.inline_engine import InlineEngine
from unit.engines.scheduler.harness import FIRST, NAN, RAISE, VOCAB, Clock, alone


class PausingRunner(SimulatedRunner):
    """Counts its steps, and can be made to break."""

    num_steps = 0
    broken = False

    def submit(self, step: SchedulerOutput) -> None:
        self.num_steps += 1
        super().submit(step)

    def reset(self) -> None:
        if self.broken:
            raise RuntimeError("it cannot even be reset")
        super().reset()


CONFIG = SimulatedConfig(
    vocab_size=VOCAB,
    first_token_id=FIRST,
    block_size=4,
    num_blocks=64,
    max_model_len=200,
    faults=f"raise={RAISE},nan={NAN}",
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def engine(clock: Clock) -> AsyncIterator[InlineEngine]:
    engine = InlineEngine(PausingRunner(CONFIG), SchedulerConfig(max_num_seqs=4, max_queued_requests=8), clock)
    await engine.start()
    yield engine
    await engine.stop()


def add(
    engine: Engine, prompt: Sequence[int], max_tokens: int = 6, n: int = 1, deadline: float | None = None
) -> AddRequest:
    return AddRequest(
        engine.new_ids(n), list(prompt), SamplingParams(max_tokens=max_tokens, temperature=0), 0.0, deadline
    )


async def collect(stream: RequestStream) -> dict[int, RequestOutput]:
    """Each id's tokens in one output, its last."""
    results: dict[int, RequestOutput] = {}
    async with asyncio.timeout(30):
        async for outputs in stream:
            for output in outputs:
                tokens = results[output.id].token_ids if output.id in results else []
                assert output.id not in results or results[output.id].finish_reason is None, "more after the end"
                output.token_ids = tokens + output.token_ids
                results[output.id] = output
    return results


async def test_a_request_gets_its_tokens_and_an_end(engine: InlineEngine) -> None:
    request = add(engine, [1, 2, 3])
    results = await collect(engine.submit([request]))
    (output,) = results.values()
    assert output.token_ids == alone([1, 2, 3], request.params)[0]
    assert output.finish_reason is FinishReason.LENGTH


async def test_the_prompts_of_one_call_share_a_stream(engine: InlineEngine) -> None:
    requests = [add(engine, [1, 2], n=2), add(engine, [3] * 9)]
    results = await collect(engine.submit(requests))
    assert set(results) == {*requests[0].ids, *requests[1].ids}
    for request in requests:
        for request_id in request.ids:
            assert results[request_id].token_ids == alone(request.prompt_token_ids, request.params)[0]


async def test_many_callers_at_once_each_get_their_own(engine: InlineEngine) -> None:
    requests = [add(engine, [i % 8, i // 8, 1], max_tokens=3 + i % 5) for i in range(12)]
    results = await asyncio.gather(*(collect(engine.submit([request])) for request in requests))
    for request, result in zip(requests, results, strict=True):
        assert result[request.ids[0]].token_ids == alone(request.prompt_token_ids, request.params)[0]
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    assert engine.stats.admitted == sum(engine.stats.finished.values()) == 12


async def test_a_reader_that_comes_late_finds_everything_merged(engine: InlineEngine) -> None:
    request = add(engine, [1, 2, 3])
    stream = engine.submit([request])
    while stream.live_ids:
        await asyncio.sleep(0)
    (output,) = await anext(stream)
    assert output.token_ids == alone([1, 2, 3], request.params)[0]
    assert output.prompt is not None
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_leaving_a_stream_aborts_it(engine: InlineEngine) -> None:
    request, other = add(engine, [1], max_tokens=100), add(engine, [2])
    async with engine.submit([request]) as stream:
        await anext(stream)
    await collect(engine.submit([other]))
    assert engine.stats.finished == {"abort": 1, "length": 1}
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


async def test_an_abort_ends_the_stream_at_once(engine: InlineEngine) -> None:
    request = add(engine, [1], max_tokens=100, n=2)
    stream = engine.submit([request])
    await anext(stream)
    engine.abort([request.ids[0], 12345])
    engine.abort([request.ids[0]])
    assert stream.live_ids == {request.ids[1]}
    results = await collect(stream)
    assert results[request.ids[0]].finish_reason is FinishReason.ABORT
    assert results[request.ids[1]].finish_reason is FinishReason.LENGTH


async def test_refusals_come_through_the_stream(engine: InlineEngine) -> None:
    long, short = add(engine, [1] * 300), add(engine, [1])
    results = await collect(engine.submit([long, short]))
    assert results[long.ids[0]].finish_reason is FinishReason.ERROR
    assert results[short.ids[0]].finish_reason is FinishReason.LENGTH


async def test_a_full_queue_says_when_to_come_back(engine: InlineEngine) -> None:
    streams = [engine.submit([add(engine, [i], max_tokens=50)]) for i in range(14)]
    results = [next(iter((await collect(stream)).values())) for stream in streams]
    errors = [result.error for result in results if result.error is not None]
    assert [error.code for error in errors] == ["queue_full"] * 2
    assert all(error.retry_after is not None for error in errors)


async def test_deadlines_go_by_the_engines_clock(engine: InlineEngine, clock: Clock) -> None:
    stream = engine.submit([add(engine, [1], max_tokens=150, deadline=clock.now + 1)])
    await anext(stream)
    clock.now += 1
    (output,) = (await collect(stream)).values()
    assert output.error is not None
    assert output.error.code == "deadline_exceeded"


@pytest.mark.parametrize(("marker", "code"), [(NAN, "numerical_error"), (RAISE, "step_failed")])
async def test_a_failure_is_told_and_the_engine_goes_on(engine: InlineEngine, marker: int, code: str) -> None:
    (output,) = (await collect(engine.submit([add(engine, [marker])]))).values()
    assert output.error is not None
    assert output.error.code == code
    request = add(engine, [1, 2])
    (output,) = (await collect(engine.submit([request]))).values()
    assert output.token_ids == alone([1, 2], request.params)[0]


async def test_an_engine_that_breaks_ends_its_streams(engine: InlineEngine, caplog: pytest.LogCaptureFixture) -> None:
    runner = engine.core.runner
    assert isinstance(runner, PausingRunner)
    runner.broken = True
    results = await collect(engine.submit([add(engine, [RAISE], n=2), add(engine, [1])]))
    assert {output.error.code for output in results.values() if output.error} == {"engine_dead"}
    assert len(results) == 3
    assert "it cannot even be reset" in caplog.text
    assert not engine.ready
    with pytest.raises(NotReadyError):
        engine.submit([add(engine, [1])])


async def test_stopping_ends_what_runs(engine: InlineEngine) -> None:
    stream = engine.submit([add(engine, [1], max_tokens=100)])
    await anext(stream)
    await engine.stop()
    (output,) = (await collect(stream)).values()
    assert output.error is not None
    assert output.error.code == "engine_dead"


async def test_an_engine_that_was_not_started_takes_nothing() -> None:
    engine = InlineEngine(SimulatedRunner(CONFIG), SchedulerConfig())
    assert not engine.ready
    with pytest.raises(NotReadyError):
        engine.submit([add(engine, [1])])


async def test_an_idle_engine_takes_no_steps(engine: InlineEngine) -> None:
    runner = engine.core.runner
    assert isinstance(runner, PausingRunner)
    await collect(engine.submit([add(engine, [1], max_tokens=3)]))
    steps = runner.num_steps
    for _ in range(20):
        await asyncio.sleep(0)
    assert runner.num_steps == steps == 3
