"""Random numbers as a pure function of (seed, index): nothing to store, nothing that preemption could disturb."""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the step of the SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014)."""


def uniform(seed: int, index: int) -> float:
    """In [0, 1), a multiple of 2**-53. `seed` may be any integer; it is taken modulo 2**64.

    The seed is mixed before the index is added: neighbouring seeds (the parallel samples of one request) would
    otherwise walk through the same sequence, one step apart.
    """
    return (_mix(_mix((seed + _GOLDEN) & _MASK) + (index + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    """SplitMix64's finalizer: each bit of the input changes each bit of the output with probability one half."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
