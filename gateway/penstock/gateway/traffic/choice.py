"""Which of several targets a key belongs to: rendezvous hashing with weights.

Each target draws an exponential time at the rate of its weight, from a hash of the key and its own name; the earliest
one has the key. So shares are as the weights say, nothing is kept, and a weight that grows takes keys from the others
while no other key moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b

_RANGE = 2.0**64


def fraction(key: bytes, salt: str) -> float:
    """Above 0 and at most 1, the same for the same key and salt, and evenly spread over keys."""
    digest = blake2b(b"%b\0%b" % (salt.encode(), key), digest_size=8, usedforsecurity=False).digest()
    return (int.from_bytes(digest, "big") + 0.5) / _RANGE


def choose(key: bytes, weights: Iterable[tuple[str, float]]) -> str | None:
    """One of the names, each with its weight; None where no weight is above 0."""
    best, found = math.inf, None
    for name, weight in weights:
        if weight > 0:
            time = -math.log(fraction(key, name)) / weight
            if found is None or time < best:
                best, found = time, name
    return found
