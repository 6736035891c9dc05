"""A shift: one target takes over from the others step by step, or gives everything back. Times are passed in.

waiting ──all targets there──► running ──last step over──► complete
                                  └──a limit exceeded, or the target gone──► rolled_back
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from enum import StrEnum

from penstock.gateway.configuration.traffic_rules import ShiftRule
from penstock.gateway.requests.record import Outcome

_SMALLEST = 1e-5
_GROWTH = math.log(1.05)
_FAULTS = frozenset((Outcome.REFUSED, Outcome.DEADLINE, Outcome.SERVER_ERROR))


class Latencies:
    """Seconds, in buckets of which each is 5 % wider than the one before: quantiles are right to that, in bounded
    memory."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0

    def add(self, seconds: float) -> None:
        bucket = max(0, math.ceil(math.log(max(seconds, _SMALLEST) / _SMALLEST) / _GROWTH))
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket that has it; None while there is nothing."""
        left = share * self.count
        for bucket, count in sorted(self._buckets.items()):
            left -= count
            if left <= 1e-9:
                return _SMALLEST * math.exp(bucket * _GROWTH)
        return None


class ShiftWindow:
    def __init__(self) -> None:
        self.ended = 0
        self.failed = 0
        self.refused = 0
        """Requests counted as errors."""
        self.latencies = Latencies()

    def add(self, outcome: Outcome, seconds: float | None) -> None:
        """`seconds`: of good answers. What says nothing of the target, a client that leaves for one, is left out."""
        if outcome is Outcome.OK:
            if seconds is not None:
                self.latencies.add(seconds)
        elif outcome in _FAULTS:
            self.failed += 1
        elif outcome is Outcome.CLIENT_ERROR:
            self.refused += 1
        else:
            return
        self.ended += 1

    @property
    def refused_rate(self) -> float:
        return self.refused / self.ended if self.ended else 0.0

    def error_rate(self, usual_refused: float = 0.0) -> float:
        """`usual_refused`: the part of all requests that others call wrong, too. What is refused beyond that counts as
        failed: a broken model may say of good requests that they are wrong."""
        return (self.failed + max(0.0, self.refused - usual_refused * self.ended)) / self.ended if self.ended else 0.0

    @property
    def p95(self) -> float | None:
        return self.latencies.quantile(0.95)


class ShiftState(StrEnum):
    WAITING = "waiting"
    """Until all targets are there."""
    RUNNING = "running"
    COMPLETE = "complete"
    ROLLED_BACK = "rolled_back"


class Shift:
    def __init__(self, rule: ShiftRule, tell: Callable[[int, str], None]) -> None:
        """`tell` gets a sentence for each change of state or step, with its level in the log."""
        self.rule = rule
        self.state = ShiftState.WAITING
        self.step = 0
        self.reason = ""
        """Why it was rolled back."""
        self.new = ShiftWindow()
        """Of `rule.to`, in this step."""
        self.old = ShiftWindow()
        """Of the other targets, since the shift began."""
        self._tell = tell
        self._step_began = 0.0

    @property
    def percent(self) -> float:
        """What `rule.to` gets of the requests."""
        match self.state:
            case ShiftState.RUNNING:
                return self.rule.steps[self.step].percent
            case ShiftState.COMPLETE:
                return 100.0
        return 0.0

    def advance(self, now: float, *, new_available: bool, old_available: bool) -> None:
        """Before a request is given to a target, and whenever the rule is read. `now` in seconds, of a clock that never
        goes back."""
        if self.state is ShiftState.WAITING and new_available and old_available:
            self.state, self._step_began = ShiftState.RUNNING, now
            self._tell(logging.INFO, f"shift to {self.rule.to} began: {self.percent:g} %")
        elif self.state is ShiftState.RUNNING:
            if not new_available:
                self._roll_back("it is not available")
            elif now >= self._step_began + self.rule.steps[self.step].seconds:
                self._next_step(now)

    def ended(self, target: str, outcome: Outcome, seconds: float | None, now: float) -> None:
        """A request has ended at a target. `seconds`: until its answer, or the first response of a stream."""
        if self.state is not ShiftState.RUNNING:
            return
        if target != self.rule.to:
            self.old.add(outcome, seconds)
            return
        self.new.add(outcome, seconds)
        reason = self._exceeded()
        if reason is not None:
            self._roll_back(reason)
        elif now >= self._step_began + self.rule.steps[self.step].seconds:
            self._next_step(now)

    @property
    def error_rate(self) -> float:
        """Of `rule.to`, in this step."""
        return self.new.error_rate(self.old.refused_rate)

    def _next_step(self, now: float) -> None:
        """A step without enough requests to judge it goes on."""
        if self.new.ended < self.rule.min_requests:
            return
        if self.step + 1 == len(self.rule.steps):
            self.state = ShiftState.COMPLETE
            self._tell(logging.INFO, f"shift to {self.rule.to} is complete")
            return
        self.step += 1
        self.new, self._step_began = ShiftWindow(), now
        self._tell(logging.INFO, f"shift to {self.rule.to}: {self.percent:g} %")

    def _exceeded(self) -> str | None:
        """What limit, in words."""
        rule, new = self.rule, self.new
        if new.ended < rule.min_requests:
            return None
        if self.error_rate > rule.max_error_rate:
            counts = f"{new.failed} failed and {new.refused} refused of {new.ended}"
            return f"error rate {self.error_rate:.3g} above {rule.max_error_rate:g} ({counts})"
        p95, old = new.p95, self.old.p95
        if p95 is None:
            return None
        if rule.max_latency_ms is not None and p95 * 1000 > rule.max_latency_ms:
            return f"p95 latency {p95 * 1000:.3g} ms above {rule.max_latency_ms:g} ms"
        enough = old is not None and self.old.ended >= rule.min_requests
        if rule.max_latency_ratio is not None and old is not None and enough and p95 > rule.max_latency_ratio * old:
            return f"p95 latency {p95 / old:.3g} times that of the others, above {rule.max_latency_ratio:g}"
        return None

    def _roll_back(self, reason: str) -> None:
        self.state, self.reason = ShiftState.ROLLED_BACK, reason
        self._tell(logging.WARNING, f"shift to {self.rule.to} stopped and rolled back: {reason}")
