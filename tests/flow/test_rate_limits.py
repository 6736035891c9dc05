"""Models that share resources of the rate limiter: their instances, queues and sequences."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable

import pytest

from penstock.classic.base import Batch
from penstock.classic.batching.rate_limiter import ANY_DEVICE, RateLimiter
from penstock.classic.loading import ClassicModel
from penstock.classic.messages import InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError, NotReadyError
from support.classic import (
    ECHO,
    FakeAsyncInstance,
    FunctionBackend,
    Gate,
    check_books,
    echo,
    echo_request,
    load,
    model_config,
    served,
    until,
)

pytestmark = pytest.mark.timeout(30)
"""What is never woken shows soon."""


def limited(resources: str, *more: str, priority: int = 0, count: int = 1) -> ModelConfig:
    """`resources` as `R:2 Q:1`, the names in lower case are global."""
    written = [
        f'{{ name: "{name}" count: {number} global: {str(name.islower()).lower()} }}'
        for name, number in (text.split(":") for text in resources.split())
    ]
    group = f"kind: KIND_CPU count: {count} rate_limiter {{ priority: {priority} resources [ {', '.join(written)} ] }}"
    return model_config(ECHO, f"instance_group {{ {group} }}", *more)


class Watch:
    """Executions of all models at the same time, the most there have been, and whose they were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0
        self.order: list[str] = []

    def model(self, name: str) -> FunctionBackend:
        def execute(batch: Batch) -> None:
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
                self.order.append(name)
            time.sleep(0.001)  # without it two executions would seldom overlap
            with self._lock:
                self.now -= 1
            echo(batch)

        return FunctionBackend(lambda context: execute)


async def ask(model: ClassicModel, numbers: Iterable[int]) -> None:
    answers = await asyncio.gather(*(model.infer(echo_request(number)) for number in numbers))
    assert len(answers) == len(list(numbers))


async def executing(model: ClassicModel, gate: Gate) -> asyncio.Future[InferResponse]:
    """A request that the model executes until the gate is opened."""
    asked = asyncio.ensure_future(model.infer(echo_request(1)))
    await until(lambda: len(gate.batches) == 1)
    return asked


@pytest.mark.parametrize("resources", ["R:1", "r:1"])
async def test_two_models_with_one_resource_never_execute_together(resources: str) -> None:
    limiter, watch = RateLimiter(), Watch()
    async with (
        served(limited(resources, count=2), watch.model("a"), limiter) as first,
        served(limited(resources, "dynamic_batching { }"), watch.model("b"), limiter) as second,
    ):
        await asyncio.gather(ask(first, range(40)), ask(second, range(40)))
        check_books(first, 40)
        check_books(second, 40)
    assert watch.most == 1
    assert limiter.held == {}


@pytest.mark.parametrize("resources", ["R:1", "R:0"])
async def test_with_enough_of_the_resource_they_do(resources: str) -> None:
    limiter = RateLimiter({(ANY_DEVICE, "R"): 2})
    gates = Gate(), Gate()
    async with (
        served(limited(resources), gates[0], limiter) as first,
        served(limited(resources), gates[1], limiter) as second,
    ):
        answers = [asyncio.ensure_future(model.infer(echo_request(1))) for model in (first, second)]
        await until(lambda: all(gate.batches for gate in gates))
        for gate in gates:
            gate.open.set()
        await asyncio.gather(*answers)


async def test_a_model_with_priority_two_gets_half_the_executions() -> None:
    limiter, watch = RateLimiter(), Watch()
    async with (
        served(limited("R:1"), watch.model("often"), limiter) as often,
        served(limited("R:1", priority=2), watch.model("seldom"), limiter) as seldom,
    ):
        await asyncio.gather(ask(often, range(60)), ask(seldom, range(60)))
    # As long as both have something to do: the first model is through after 60 of its own and 30 of the other one's.
    assert abs(watch.order[:90].count("seldom") - 30) <= 1


async def test_instances_of_sequences_wait_for_the_resource_too() -> None:
    sequences = "sequence_batching { max_sequence_idle_microseconds: 60000000 }"
    limiter, watch = RateLimiter(), Watch()
    async with (
        served(limited("R:1", sequences, count=2), watch.model("sequences"), limiter) as first,
        served(limited("R:1"), watch.model("other"), limiter) as second,
    ):
        steps = [
            first.infer(echo_request(1, correlation_id=id, sequence_start=not step, sequence_end=step == 4))
            for id in range(1, 13)
            for step in range(5)
        ]
        await asyncio.gather(*steps, ask(second, range(20)))
        check_books(first, 60)
    assert watch.most == 1


async def test_who_waits_for_a_resource_does_not_hold_up_one_that_needs_another() -> None:
    limiter, gate = RateLimiter(), Gate()
    async with (
        served(limited("R:1"), gate, limiter) as holder,
        served(limited("R:1 Q:1"), echo, limiter) as waiting,
        served(limited("S:1"), echo, limiter) as other,
    ):
        first = await executing(holder, gate)
        second = asyncio.ensure_future(waiting.infer(echo_request(2)))
        await ask(other, range(5))
        assert not second.done()
        gate.open.set()
        await asyncio.gather(first, second)


async def test_a_request_that_is_cancelled_while_it_waits_leaves_the_resource_to_others() -> None:
    limiter, gate = RateLimiter(), Gate()
    async with (
        served(limited("R:1"), gate, limiter) as holder,
        served(limited("R:1"), echo, limiter) as gone,
        served(limited("R:1"), echo, limiter) as last,
    ):
        first = await executing(holder, gate)
        cancelled = asyncio.ensure_future(gone.infer(echo_request(2)))
        await until(lambda: gone.queued == 1)
        third = asyncio.ensure_future(last.infer(echo_request(3)))
        await until(lambda: last.queued == 1)
        cancelled.cancel()
        gate.open.set()
        await asyncio.gather(first, third)
        assert gone.queued == 0
    assert limiter.held == {}


async def test_a_batch_that_still_grows_keeps_no_resource_from_others() -> None:
    delay = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 60000000 }"
    limiter, gate = RateLimiter(), Gate()
    async with (
        served(limited("R:1"), gate, limiter) as holder,
        served(limited("R:1 Q:1", delay), echo, limiter) as slow,
        served(limited("Q:1"), echo, limiter) as quick,
    ):
        first = await executing(holder, gate)
        growing = [asyncio.ensure_future(slow.infer(echo_request(number))) for number in range(3)]
        await until(lambda: slow.queued == 3)
        await ask(quick, range(5))
        gate.open.set()
        await asyncio.gather(first, *growing, slow.infer(echo_request(3)))
        assert slow.statistics.execution_count == 1


async def test_an_instance_that_dies_gives_its_resource_back() -> None:
    async def fail(batch: Batch) -> None:
        instance.become(up=False, lost=NotReadyError("it is gone"))
        raise NotReadyError("it is gone")

    instance = FakeAsyncInstance(fail)
    limiter = RateLimiter()
    dying = await load(limited("R:1"), FunctionBackend(lambda context: instance), limiter)
    async with served(limited("R:1"), echo, limiter) as other:
        answers = asyncio.gather(*(dying.infer(echo_request(number)) for number in range(3)), return_exceptions=True)
        await ask(other, range(3))
        assert {type(answer) for answer in await answers} == {NotReadyError}
        await ask(other, range(3))
    await dying.stop()
    assert limiter.held == {}


async def test_a_model_that_asks_for_more_than_there_is_does_not_load_and_leaves_nothing() -> None:
    limiter = RateLimiter({(ANY_DEVICE, "R"): 1})
    backend = FunctionBackend(lambda context: echo)
    with pytest.raises(InvalidRequestError, match=r"the minimum required count is 2$"):
        await load(limited("R:2"), backend, limiter)
    assert backend.loaded == []
    async with served(limited("R:1"), echo, limiter) as model:
        await ask(model, range(3))


async def test_a_model_that_fails_to_load_or_is_unloaded_lowers_the_default_again() -> None:
    def broken(context: object) -> object:
        raise ValueError("no such file")

    limiter, watch = RateLimiter(), Watch()
    with pytest.raises(ValueError, match="no such file"):
        await load(limited("R:2"), FunctionBackend(broken), limiter)  # type: ignore[arg-type]
    await (await load(limited("R:2"), FunctionBackend(lambda context: echo), limiter)).stop()
    async with served(limited("R:1", count=2), watch.model("two instances"), limiter) as model:
        await ask(model, range(20))
    assert watch.most == 1
