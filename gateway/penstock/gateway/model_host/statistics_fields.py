"""A model's counters on the border."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import fields
from typing import Any

from msgspec import Struct, convert

from penstock.classic.statistics import BatchStatistics, Duration, ModelStatistics, ResponseStatistics

_NAMES = tuple(field.name for field in fields(ModelStatistics) if field.name != "observer")


class _Statistics(Struct):
    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration
    batches: dict[int, BatchStatistics]
    responses: dict[int, ResponseStatistics]
    failures: dict[str, int]
    pending: int


def to_fields(statistics: ModelStatistics) -> dict[str, Any]:
    """For msgspec to encode."""
    return {name: getattr(statistics, name) for name in _NAMES}


def to_statistics(given: dict[str, Any]) -> ModelStatistics:
    """What `to_fields` made, decoded. Raises msgspec.ValidationError."""
    found = convert(given, _Statistics)
    values = {name: getattr(found, name) for name in _NAMES}
    values["batches"] = defaultdict(BatchStatistics, found.batches)
    values["responses"] = defaultdict(ResponseStatistics, found.responses)
    values["failures"] = Counter(found.failures)
    return ModelStatistics(**values)
