"""Random numbers as a pure function of (seed, index): nothing to store, nothing that preemption could disturb."""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the step of the SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014)."""


def stream_key(seed: int) -> int:
    """Where a seed's sequence starts. `seed` may be any integer; it is taken modulo 2**64.

    Mixed, because neighbouring seeds (the parallel samples of one request) would otherwise walk through the same
    sequence, a step apart.
    """
    return _mix((seed + _GOLDEN) & _MASK)


def uniform(key: int, index: int) -> float:
    """Number `index` of the sequence: in [0, 1), a multiple of 2**-53."""
    return (_mix((key + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    """SplitMix64's finalizer: each bit of the input changes each bit of the output with probability one half."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
