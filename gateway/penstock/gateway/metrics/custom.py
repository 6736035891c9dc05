"""Metrics that models report themselves, under the names that they choose."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from penstock.gateway.metrics.prometheus_text import Family

MetricKind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = ("penstock_", "nv_", "process_", "python_")
MAX_METRICS = 10_000
"""Of one server: a model that makes a metric for each request must not fill the memory."""


@dataclass(slots=True, eq=False)
class CustomMetric:
    """One metric of a family (a `Metric` of the backends). Raises ValueError for what its kind cannot do."""

    kind: MetricKind
    labels: Mapping[str, str]
    buckets: tuple[float, ...] = ()
    _value: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.buckets) + 1)

    def increment(self, value: float) -> None:
        if self.kind == "HISTOGRAM" or (self.kind == "COUNTER" and not value >= 0):
            raise ValueError(f"a {self.kind} cannot be incremented by {value:g}")
        self._value += value

    def set(self, value: float) -> None:
        if self.kind != "GAUGE":
            raise ValueError(f"a {self.kind} cannot be set")
        self._value = value

    def observe(self, value: float) -> None:
        if self.kind != "HISTOGRAM":
            raise ValueError(f"a {self.kind} observes nothing")
        self._value += value
        self._counts[bisect_left(self.buckets, value)] += 1

    def value(self) -> float:
        if self.kind == "HISTOGRAM":
            raise ValueError("a HISTOGRAM has no single value")
        return self._value

    def samples(self, family: Family) -> None:
        """Adds its samples to its family."""
        if self.kind != "HISTOGRAM":
            family.add(self.labels, _shown(self._value))
            return
        count = 0
        for bound, inside in zip((*self.buckets, math.inf), self._counts, strict=True):
            count += inside
            family.add({**self.labels, "le": "+Inf" if bound == math.inf else f"{bound:g}"}, count, "_bucket")
        family.add(self.labels, count, "_count")
        family.add(self.labels, _shown(self._value), "_sum")


def _shown(value: float) -> float:
    """As Triton writes it: 2 and not 2.0."""
    return int(value) if float(value).is_integer() and abs(value) < 1 << 53 else value


@dataclass(slots=True)
class _CustomFamily:
    kind: MetricKind
    text: str
    metrics: dict[tuple[tuple[str, str], ...], CustomMetric] = field(default_factory=dict)


class CustomMetrics:
    """All of a server. See `Host.metric`."""

    def __init__(self) -> None:
        self._families: dict[str, _CustomFamily] = {}
        self._count = 0

    def family(self, kind: str, name: str, description: str) -> None:
        """See `Host.metric_family`."""
        self._families[name] = self._family(kind, name, description)

    def metric(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float] = ()
    ) -> CustomMetric:
        if not all(isinstance(value, str) for value in labels.values()):
            raise ValueError("the values of a metric's labels must be text")
        family = self._family(kind, name, description)
        key = tuple(sorted(labels.items()))
        metric = family.metrics.get(key)
        if metric is None:
            metric = family.metrics[key] = self._new(family.kind, labels, tuple(float(bound) for bound in buckets))
            self._families[name] = family
        return metric

    def _family(self, kind: str, name: str, description: str) -> _CustomFamily:
        # a number in one of them would fail each page of metrics
        if not isinstance(name, str) or not isinstance(description, str):
            raise ValueError("a metric's name and its description must be text")
        family = self._families.get(name)
        if family is None:
            if kind not in get_args(MetricKind):
                raise ValueError(f"there is no metric kind {kind!r}")
            if not _NAME.fullmatch(name) or name.startswith(_OURS):
                raise ValueError(f"{name!r} cannot be the name of a model's metric")
            if len(self._families) >= MAX_METRICS:
                raise ValueError(f"models may report at most {MAX_METRICS} metrics")
            family = _CustomFamily(kind, description)  # type: ignore[arg-type]
        if family.kind != kind:
            raise ValueError(f"the metric {name!r} is a {family.kind}")
        return family

    def _new(self, kind: MetricKind, labels: Mapping[str, str], buckets: tuple[float, ...]) -> CustomMetric:
        if any(not _LABEL.fullmatch(label) for label in labels):
            raise ValueError("the name of a label must be a word")
        if list(buckets) != sorted(set(buckets)) or (buckets and kind != "HISTOGRAM"):
            raise ValueError("a HISTOGRAM, and nothing else, has ascending buckets")
        if self._count >= MAX_METRICS:
            raise ValueError(f"models may report at most {MAX_METRICS} metrics")
        self._count += 1
        return CustomMetric(kind, dict(sorted(labels.items())), buckets)

    def families(self) -> Iterator[Family]:
        """Those with metrics, as Triton shows them."""
        for name, custom in self._families.items():
            if not custom.metrics:
                continue
            family = Family(name, custom.kind.lower(), custom.text)  # type: ignore[arg-type]
            for metric in custom.metrics.values():
                metric.samples(family)
            yield family
