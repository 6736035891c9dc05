"""A model's statistics on their way from a front to the supervisor: what has been counted since they left last."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from penstock.classic.statistics import ModelStatistics

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
            counted = {str(key): take(each) if is_dataclass(each) else each for key, each in value.items()}
            counted = {key: each for key, each in counted.items() if each}
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
