"""Driving an engine core by hand, one step at a time."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.batcher import Batcher
from penstock.engines.contract.messages import AbortRequests, AddRequest, DownMessage, RequestOutput, SamplingParams
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.core import EngineCore
from penstock.engines.scheduler.config import SchedulerConfig


class Driver:
    """An engine core with an inbox, that checks its own integrity after every step and at idle."""

    core: EngineCore | AutonomousCore

    def __init__(self, engine: ModelRunner | Batcher, **scheduler: Any) -> None:
        """A runner forgets everything; what a batcher holds or has cached stays."""
        self.now = 0.0
        config = SchedulerConfig(**scheduler)
        if hasattr(engine, "execute"):
            engine.reset()
            self.core = EngineCore(engine, config, lambda: self.now)
        else:
            self.core = AutonomousCore(engine, config, lambda: self.now)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, RequestOutput] = {}
        self._inbox: list[DownMessage] = []
        self._next_id = 1

    def add(
        self, prompt: Sequence[int], max_tokens: int, n: int = 1, adapter: str = "", **params: Any
    ) -> tuple[int, ...]:
        """Greedy unless told otherwise, and never ended by EOS."""
        ids = tuple(range(self._next_id, self._next_id + n))
        self._next_id += n
        sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **params})
        self._inbox.append(AddRequest(ids, list(prompt), sampling, arrival_time=self.now, adapter=adapter))
        self.tokens.update((i, []) for i in ids)
        return ids

    def abort(self, *ids: int) -> None:
        self._inbox.append(AbortRequests(list(ids)))

    def step(self) -> list[RequestOutput]:
        messages, self._inbox = self._inbox, []
        wakeup = self.core.wakeup
        if wakeup is not None and not messages and not select.select([wakeup], [], [], 60)[0]:
            raise AssertionError("the engine holds requests and says nothing")
        outputs = self.core.step(messages).outputs
        self.core.check_integrity()
        for output in outputs:
            self.tokens[output.id] += output.token_ids
            if output.finish_reason is not None:
                if output.id in self.ends:
                    raise AssertionError(f"request {output.id} ended twice")
                self.ends[output.id] = output
        return outputs

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until everything has ended, or until a condition holds."""
        while (self._inbox or self.has_work) and not (until is not None and until()):
            self.step()

    @property
    def has_work(self) -> bool:
        """Whether steps would bring anything, sooner or later."""
        return self.core.has_work or (self.core.wakeup is not None and self.stats.num_running > 0)

    @property
    def stats(self) -> Any:
        return self.core.stats()


def generate_alone(runner: ModelRunner, prompt: Sequence[int], count: int, adapter: str = "") -> list[int]:
    """What one request gives that has the engine to itself."""
    driver = Driver(runner, enable_prefix_caching=False)
    [request_id] = driver.add(prompt, count, adapter=adapter)
    driver.run()
    return driver.tokens[request_id]
