"""How many replicas there should be: the rule of Kubernetes' HorizontalPodAutoscaler, with the behavior that
deploy/kubernetes/components/hpa asks for. Plain data: times are passed in."""

from __future__ import annotations

import math
from collections import deque

from penstock.loadtest.errors import LoadTestError
from penstock.planning.options import ScalingOptions

_TOLERANCE = 0.1
"""So near to the target nothing is changed."""
_DOUBLING = 60.0
"""In so many seconds the number may double."""


class Autoscaler:
    def __init__(self, settings: ScalingOptions) -> None:
        """Raises LoadTestError."""
        self.least, self.most = _range(settings.autoscale or "")
        self._settings = settings
        self._wanted: deque[tuple[float, int]] = deque()
        """What was recommended, and when, as far back as scale-in looks."""
        self._numbers: deque[tuple[float, int]] = deque()
        """How many there were, as far back as scale-out looks."""
        self._last_in = -math.inf

    def number(self, now: float, current: int, waiting: int, kv_use: float) -> int:
        """The number of replicas from now on. `current`: those that serve or start; `waiting`: requests that wait at
        all of them; `kv_use`: the sum of their shares of the KV cache that are in use."""
        settings = self._settings
        load = max(waiting / settings.scale_queue, kv_use / settings.scale_kv)
        near = current > 0 and abs(load / current - 1) <= _TOLERANCE
        wanted = current if near else min(self.most, max(self.least, math.ceil(load)))
        _keep(self._wanted, now, wanted, settings.scale_in_after)
        _keep(self._numbers, now, current, _DOUBLING)
        if wanted > current:
            return min(wanted, max(self.least, 2 * min(number for _, number in self._numbers)))
        enough = max(number for _, number in self._wanted)
        if enough < current and now - self._last_in >= settings.scale_in_pause:
            self._last_in = now
            return current - 1
        return max(current, self.least)


def _keep(rows: deque[tuple[float, int]], now: float, number: int, seconds: float) -> None:
    rows.append((now, number))
    while rows[0][0] < now - seconds:
        rows.popleft()


def _range(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not colon or not least.isdigit() or not most.isdigit() or not 1 <= int(least) <= int(most):
        raise LoadTestError(f"autoscale: {text!r} is not least and most replicas, such as 2:8")
    return int(least), int(most)
