"""What the tests of all engines share."""

from __future__ import annotations

import random

from helpers_engine import Driver


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def driver_of(candidate, **scheduler):
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    candidate.forget()
    return Driver(candidate.engine, **defaults | scheduler)
