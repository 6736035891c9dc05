"""A Prometheus histogram that takes many equal observations at the price of one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Buckets by upper bound. `observe` is on the token path: a bisection and three additions, no lock."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def samples(self, labels: dict[str, str]) -> Iterator[HistogramMetricFamily]:
        """The family with this histogram as its only member."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=list(labels))
        bounds = [*map(str, self._bounds), "+Inf"]
        cumulative = accumulate(self._counts)
        family.add_metric(list(labels.values()), list(zip(bounds, cumulative, strict=True)), self._sum)
        yield family
