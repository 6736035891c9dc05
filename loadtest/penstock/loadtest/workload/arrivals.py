"""When sessions begin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from random import Random

from penstock.loadtest.options import LoadOptions


def arrivals(load: LoadOptions, rng: Random) -> Iterator[float | None]:
    """Seconds after the start, without end and never falling; None in a closed loop.

    The times are those of the random process: they are not stretched so that a run of some length meets its mean rate,
    which would take the spread out of the number of arrivals. Constant times begin at 0, random ones after a gap.
    """
    if load.rate is None:
        yield from repeat(None)
        return
    passed = 0.0  # what the rate adds up to until the arrival: requests that should have come on average
    while True:
        if load.arrival == "constant":
            yield _when(passed, load.rate, load.ramp)
            passed += 1.0
        else:
            passed += rng.expovariate(1.0) if load.arrival == "poisson" else _gamma_gap(load.burstiness, rng)
            yield _when(passed, load.rate, load.ramp)


def _gamma_gap(shape: float, rng: Random) -> float:
    """Mean 1, variance 1/shape."""
    return rng.gammavariate(shape, 1.0 / shape)


def _when(passed: float, rate: float, ramp: float) -> float:
    """The time until which a rate that rises linearly for `ramp` seconds, then stays, adds up to `passed`."""
    in_ramp = rate * ramp / 2
    if passed < in_ramp:
        return math.sqrt(2 * ramp * passed / rate)
    return ramp + (passed - in_ramp) / rate
