"""Metrics of several processes as those of one server: plain data.

Counters and histograms are added up, those of processes that have ended too, so that no sum ever falls. Gauges are
added up over the processes that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from prometheus_client.core import Metric

from penstock.classic.statistics import ModelStatistics

_LARGEST = frozenset({"penstock_event_loop_lag_seconds"})
"""Gauges of which the largest counts."""
_FALLING = ("gauge", "info", "stateset", "unknown")
"""Kinds of which nothing stays when their process has ended."""

Labels = tuple[tuple[str, str], ...]
"""Sorted."""


class Samples(msgspec.Struct, kw_only=True):
    """A family: its samples by name and labels."""

    name: str
    kind: str
    text: str
    values: list[tuple[str, Labels, float]]


def samples_of(families: Iterable[Metric]) -> list[Samples]:
    """Families as they can travel; those of the same name together."""
    samples: dict[str, Samples] = {}
    for family in families:
        known = samples.setdefault(
            family.name, Samples(name=family.name, kind=family.type, text=family.documentation, values=[])
        )
        known.values += ((sample.name, _sorted(sample.labels), sample.value) for sample in family.samples)
    return list(samples.values())


def _sorted(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


class Sums:
    """Values of several processes, added up."""

    def __init__(self) -> None:
        self._families: dict[str, Samples] = {}
        self._values: dict[str, dict[tuple[str, Labels], float]] = {}

    def add(self, families: Iterable[Samples], *, ended: bool = False) -> None:
        """`ended`: the process is gone, and so are its gauges."""
        for family in families:
            if ended and family.kind in _FALLING:
                continue
            self._families.setdefault(family.name, family)
            values = self._values.setdefault(family.name, {})
            for name, labels, value in family.values:
                before = values.get((name, labels))
                if before is None:
                    values[name, labels] = value
                else:
                    values[name, labels] = max(before, value) if family.name in _LARGEST else before + value

    def samples(self) -> list[Samples]:
        return [
            Samples(
                name=name,
                kind=family.kind,
                text=family.text,
                values=[(sample, labels, value) for (sample, labels), value in self._values[name].items()],
            )
            for name, family in self._families.items()
        ]

    def metrics(self) -> dict[str, Metric]:
        """By name, as prometheus-client has them."""
        metrics = {}
        for family in self.samples():
            metric = metrics[family.name] = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.values:
                metric.add_sample(name, dict(labels), value)
        return metrics


Counts = dict[str, Any]
"""Numbers by field, and the same below fields that have several."""
_LATEST = "last_inference_ms"
_STAYS = ("pending", "observer")


def take(part: Any) -> Counts:
    """Plain data of what `part`, a ModelStatistics or a piece of one, has counted; from now on it counts from 0."""
    taken: Counts = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name in _STAYS:
            continue
        if isinstance(value, int):
            counted: Any = value
            setattr(part, field.name, 0)
        elif is_dataclass(value):
            counted = take(value)
        else:
            counted = {str(key): take(item) if is_dataclass(item) else item for key, item in value.items()}
            counted = {key: item for key, item in counted.items() if item}
            if not any(map(is_dataclass, value.values())):
                value.clear()
        if counted:
            taken[field.name] = counted
    return taken


def add(statistics: ModelStatistics, counts: Counts) -> None:
    """What `take` has given."""
    counts = dict(counts)
    statistics.last_inference_ms = max(statistics.last_inference_ms, counts.pop(_LATEST, 0))
    for reason, count in counts.pop("failures", {}).items():
        statistics.failures[reason] += count
    for name in ("batches", "responses"):
        pieces = getattr(statistics, name)
        for number, piece in counts.pop(name, {}).items():
            _add(pieces[int(number)], piece)
    _add(statistics, counts)


def _add(part: Any, counts: Counts) -> None:
    for name, counted in counts.items():
        value = getattr(part, name)
        if isinstance(counted, int):
            setattr(part, name, value + counted)
        else:
            _add(value, counted)
