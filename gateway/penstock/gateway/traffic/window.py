"""What a target has answered in a while: how much of it failed, and how quickly the rest came."""

from __future__ import annotations

import math

from penstock.gateway.front.record import Outcome

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


class Window:
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
