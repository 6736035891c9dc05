"""Medians of repeats, in a table."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    seconds: float
    """For one operation; the median of the repeats."""
    operations: int
    """In one repeat."""

    def row(self) -> str:
        return f"{self.name:<58} {self.seconds * 1e6:>10.3f} us {1 / self.seconds:>14,.0f} /s"


def measure(name: str, operations: int, run: Callable[[], None], repeats: int = 7) -> Measurement:
    """Times `run`, which does `operations` operations, after one run that does not count. The garbage collector is off
    meanwhile, as timeit does it."""
    run()
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    finally:
        gc.enable()
    return Measurement(name, statistics.median(times) / operations, operations)
