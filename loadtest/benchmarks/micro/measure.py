"""Timing: calibrated rounds, as pytest-benchmark makes them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from time import perf_counter

from benchmarks.micro.benchmark import Work

LEAST_ROUNDS = 5
_ROUNDS = 100
"""As many as fill the time, unless a single call takes longer than its share of it."""
_SHORTEST_ROUND = 0.001
"""Seconds. Reading the clock twice takes a ten-thousandth of that."""


@dataclass(frozen=True, slots=True)
class Rounds:
    seconds: list[float]
    """For one operation; one figure for each round."""
    operations: int
    """In one round."""


def measure(work: Work, seconds: float) -> Rounds:
    """Times `work` until at least `seconds` have been timed, after a calibration that warms up. The garbage collector
    is off meanwhile, as timeit does it."""
    gc.collect()
    gc.disable()
    try:
        calls = _calibrate(work, max(seconds / _ROUNDS, _SHORTEST_ROUND))
        times: list[float] = []
        total = 0.0
        while total < seconds or len(times) < LEAST_ROUNDS:
            elapsed = _round(work, calls)
            total += elapsed
            times.append(elapsed / (calls * work.operations))
    finally:
        gc.enable()
    return Rounds(times, calls * work.operations)


def _calibrate(work: Work, shortest: float) -> int:
    """Calls that take at least `shortest` seconds, also the second time: the first one may have had to wait for a
    processor, or to import something. What has to be renewed is called once in a round."""
    calls = 1
    while True:
        elapsed = _round(work, calls)
        if work.renew is not None:
            return calls
        if elapsed >= shortest:
            elapsed = _round(work, calls)
        if elapsed >= shortest:
            return calls
        calls = max(2 * calls, int(calls * shortest / elapsed * 1.1)) if elapsed else 10 * calls


def _round(work: Work, calls: int) -> float:
    if work.renew is not None:
        work.renew()
    run = work.run
    repeat = range(calls)
    started = perf_counter()
    for _ in repeat:
        run()
    return perf_counter() - started
