"""What the tests of all engines share."""

from __future__ import annotations

import random

from helpers_door import AttachedDriver
from helpers_engine import Driver

_attached: list[AttachedDriver] = []


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def driver_of(candidate, **scheduler):
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    candidate.forget()
    if not candidate.attached:
        return Driver(candidate.engine, **defaults | scheduler)
    _attached.append(AttachedDriver(candidate.engine, **defaults | scheduler))
    return _attached[-1]


def close_drivers():
    while _attached:
        _attached.pop().core.close()
