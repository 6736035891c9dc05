"""Driving an engine core by hand, one step at a time; what a stream of an engine comes to."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.continuous_batcher import ContinuousBatcher
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    DownMessage,
    ImageInput,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.core import EngineCore
from penstock.engines.scheduler.config import SchedulerConfig


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """An engine core with an inbox, that checks its own integrity after every step and at idle."""

    core: EngineCore | AutonomousCore

    def __init__(self, engine: ModelRunner | ContinuousBatcher, **scheduler: Any) -> None:
        """A runner forgets everything; what a batcher holds or has cached stays."""
        self._clock = _Clock()  # knows nothing of the driver: a core without cycles frees its descriptors at once
        config = SchedulerConfig(**scheduler)
        self._wakeup: int | None = None
        if is_runner(engine):
            engine.reset()
            self.core = EngineCore(engine, config, self._clock)
        else:
            self.core = AutonomousCore(engine, config, self._clock)
            self._wakeup = engine.wakeup
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, RequestOutput] = {}
        self.cached: dict[int, int] = {}
        """How many tokens of each prompt were."""
        self._inbox: list[DownMessage] = []
        self._next_id = 1

    @property
    def now(self) -> float:
        return self._clock.now

    @now.setter
    def now(self, now: float) -> None:
        self._clock.now = now

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        n: int = 1,
        adapter: str = "",
        *,
        tenant: str = "",
        keep: int = 0,
        behind: Sequence[int] = (),
        images: Sequence[ImageInput] = (),
        deadline: float | None = None,
        priority: int = 0,
        **params: Any,
    ) -> tuple[int, ...]:
        """Greedy unless told otherwise, and never ended by EOS. `keep`: `AddRequest.cache_retention`; `behind`:
        `AddRequest.output_token_ids`."""
        sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **params})
        return self._add(
            prompt,
            sampling,
            n,
            adapter,
            tenant=tenant,
            cache_retention=keep,
            output_token_ids=list(behind),
            images=tuple(images),
            deadline=deadline,
            priority=priority,
            cache_salt=tenant if images else "",
        )

    def pool(self, prompt: Sequence[int], normalize: bool = False, adapter: str = "") -> int:
        """Asks for a vector: `ends` will have it."""
        return self._add(prompt, PoolingParams(normalize=normalize), 1, adapter)[0]

    def _add(
        self, prompt: Sequence[int], params: SamplingParams | PoolingParams, n: int, adapter: str, **fields: Any
    ) -> tuple[int, ...]:
        ids = tuple(range(self._next_id, self._next_id + n))
        self._next_id += n
        self._inbox.append(AddRequest(ids, list(prompt), params, arrival_time=self.now, adapter=adapter, **fields))
        self.tokens.update((i, []) for i in ids)
        return ids

    def abort(self, *ids: int) -> None:
        self._inbox.append(AbortRequests(list(ids)))

    def step(self) -> list[RequestOutput]:
        messages, self._inbox = self._inbox, []
        if self._wakeup is not None and not messages and not select.select([self._wakeup], [], [], 60)[0]:
            raise AssertionError("the engine holds requests and says nothing")
        outputs = self.core.step(messages).outputs
        self.core.check_integrity()
        for output in outputs:
            self.tokens[output.id] += output.token_ids
            if output.prompt is not None:
                self.cached[output.id] = output.prompt.num_cached_tokens
            if output.finish_reason is not None:
                if output.id in self.ends:
                    raise AssertionError(f"request {output.id} ended twice")
                self.ends[output.id] = output
        return outputs

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until everything has ended, or until a condition holds."""
        while (self._inbox or self.has_work or self._waits) and not (until is not None and until()):
            if not self._inbox and not self.has_work and not select.select(self.core.wakeups, [], [], 60)[0]:
                raise AssertionError("a grammar is not compiled, an image not encoded, or blocks are not read")
            self.step()

    @property
    def _waits(self) -> bool:
        """Requests wait for a grammar, or for blocks from files."""
        if not isinstance(self.core, EngineCore):
            return False
        return any(
            work.next_look is not None or work is self.core.images for work in self.core.side_work if work.under_way
        )

    @property
    def has_work(self) -> bool:
        """Whether steps would bring anything, sooner or later."""
        return self.core.has_work or (self.runs_by_itself and self.stats.num_running > 0)

    @property
    def runs_by_itself(self) -> bool:
        return self._wakeup is not None

    @property
    def stats(self) -> Any:
        return self.core.stats()


def is_runner(engine: ModelRunner | ContinuousBatcher) -> TypeGuard[ModelRunner]:
    """Whether our scheduler drives it."""
    return hasattr(engine, "submit")


class Failing:
    """A runner whose steps raise when they compute a prompt that begins with `marker`: like any failure inside of a
    model, as late as can be, with everything that the step writes written."""

    def __init__(self, runner: ModelRunner, marker: int) -> None:
        self._runner = runner
        self._marker = marker
        self._guilty: set[int] = set()
        self._steps: deque[SchedulerOutput] = deque()
        self.num_failures = 0

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    def submit(self, step: SchedulerOutput) -> None:
        self._guilty |= {request.id for request in step.new_requests if request.token_ids[0] == self._marker}
        self._steps.append(step)
        self._runner.submit(step)

    def collect(self) -> ModelRunnerOutput:
        result = self._runner.collect()
        if self._guilty.intersection(self._steps.popleft().request_ids):
            self.num_failures += 1
            raise RuntimeError("a failure was ordered")
        return result

    def reset(self) -> None:
        self._steps.clear()
        self._runner.reset()

    def close(self) -> None:
        self._runner.close()


async def whole_output(stream: RequestStream) -> RequestOutput:
    """All tokens in the last output."""
    tokens: list[int] = []
    async with asyncio.timeout(30):
        async for [output] in stream:
            tokens += output.token_ids
    output.token_ids = tokens
    return output
