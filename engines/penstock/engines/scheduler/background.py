"""When requests in the background compute, and how many of them at a time."""

from __future__ import annotations

import math

from penstock.engines.scheduler.budget import StepBudget
from penstock.engines.scheduler.queues import RequestQueue
from penstock.engines.scheduler.running import Run, RunningRequests

_LATELY = 2.0
"""Seconds after a request in which the next one is likely to come."""


class Background:
    """Its requests compute in steps in which no other request runs, or could. A request that comes during such a step
    waits for its end. So while others have been there lately, these steps are short."""

    def __init__(self, running: RunningRequests, waiting: RequestQueue, budget: StepBudget) -> None:
        self._running = running
        self._waiting = waiting
        self._budget = budget
        self._others_seen = -math.inf
        """When another request was there last."""

    def may_compute(self, now: float) -> bool:
        """No other request runs, or could."""
        if self._running.has_others:
            self._others_seen = now
            return False
        head = self._waiting.peek()
        return head is None or head.background

    def has_short_steps(self, now: float) -> bool:
        return now - self._others_seen <= _LATELY

    def first(self, ready: list[Run]) -> list[Run]:
        """Those of `ready` that are part of a short step. They stay the first until they end, so each has its turn."""
        return ready[: self._budget.short_step(ready[0].num_computed_tokens)]
