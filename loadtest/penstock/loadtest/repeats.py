"""Several runs of the same load: medians, and how sure they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import sqrt
from typing import Any

import msgspec

from penstock.loadtest.metrics import Figures
from penstock.loadtest.report.model import Interval

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom."""
_T95_MANY = 2.12
"""For 16; for more it errs on the wide side."""
_FEWEST = 3
"""Runs below which an interval says nothing."""


def medians(runs: Sequence[Figures]) -> dict[str, Any]:
    """As the fields of Figures: the median of each number by itself; errors are added up, texts are the last run's."""
    if len(runs) == 1:
        return msgspec.structs.asdict(runs[0])
    trees = [msgspec.to_builtins(run) for run in runs]
    merged = {name: _merge([tree[name] for tree in trees]) for name in trees[0]}
    errors = _add([tree["errors"] for tree in trees])
    return msgspec.structs.asdict(msgspec.convert(merged | {"errors": errors}, Figures))


def _merge(values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if not there:
        return None
    first = there[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in there for name in value)
        return {name: _merge([value.get(name) for value in there]) for name in names}
    if isinstance(first, bool) or not isinstance(first, int | float):
        return there[-1]
    middle = statistics.median(there)
    return round(middle) if isinstance(first, int) else middle


def _add(values: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(value.get(name, 0) for value in values) for name in dict.fromkeys(n for v in values for n in v)}


def intervals(runs: Sequence[Figures]) -> dict[str, Interval]:
    """For each number that all runs have, by its path (`ttft_ms.p99`); empty for fewer than three runs."""
    if len(runs) < _FEWEST:
        return {}
    flat = [dict(_numbers(msgspec.to_builtins(run))) for run in runs]
    shared = [path for path in flat[0] if all(path in values for values in flat)]
    return {path: interval([values[path] for values in flat]) for path in shared}


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of two values or more."""
    mean = statistics.fmean(values)
    half = student95(len(values) - 1) * statistics.stdev(values) / sqrt(len(values))
    return Interval(round(mean - half, 4), round(mean + half, 4))


def student95(degrees: int) -> float:
    """Student's t, two-sided 95 %, for one degree of freedom or more."""
    return _T95[degrees - 1] if degrees <= len(_T95) else _T95_MANY


def _numbers(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    numbers: list[tuple[str, float]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            numbers += _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append((prefix + name, float(value)))
    return numbers
