"""What the tests of all engines share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from support.door import AttachedDriver
from support.engine import Driver


class Oracle(Protocol):
    def __call__(self, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """The first `count` greedy tokens after a prompt. `guess`, what the engine says they are, changes nothing: an
        oracle may be sooner done with what is right in it."""


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
