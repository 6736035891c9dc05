"""Random numbers as a pure function of (seed, index): nothing to store, nothing that preemption could disturb."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the step of the SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014)."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def stream_key(seed: int) -> int:
    """Where a seed's sequence starts. `seed` may be any integer; it is taken modulo 2**64.

    Mixed, because neighbouring seeds (the parallel samples of one request) would otherwise walk through the same
    sequence, a step apart.
    """
    return _mix((seed + _GOLDEN) & _MASK)


def uniform(key: int, index: int) -> float:
    """Number `index` of the sequence: in [0, 1), a multiple of 2**-53."""
    return (_mix((key + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def branch(key: int, index: int) -> int:
    """The key of a sequence that belongs to number `index` of this one, for a token that takes more than one number."""
    return _mix((key + (index + 1) * _GOLDEN) & _MASK)


def uniforms(keys: npt.NDArray[np.uint64], first: int, count: int) -> npt.NDArray[np.float64]:
    """[n, count]: for each of the keys [n], what `uniform` gives for the indices from `first` on."""
    steps = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    z = keys[:, None] + steps
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    numbers: npt.NDArray[np.float64] = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return numbers


def _mix(z: int) -> int:
    """SplitMix64's finalizer: each bit of the input changes each bit of the output with probability one half."""
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)
