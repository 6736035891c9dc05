"""Which tokens may be drawn: top-k, min-p and top-p without ordering the vocabulary.

Each of them keeps a beginning of the tokens ordered by probability, ties ordered by id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import SamplingParams

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 256
"""Sums and maxima are taken of this many values first, which is several times faster than walking through all."""


def truncate(weights: Floats, params: SamplingParams) -> None:
    """Sets the weights of tokens that are left out to 0, in place. `weights` [vocab]; the largest is 1.

    min_p compares with the likeliest token, top_k counts, and top_p is taken of what these two have left.
    """
    if 0 < params.top_k < len(weights):
        ids = largest(weights, params.top_k)
        if params.min_p > 0.0:
            ids = ids[weights[ids] >= np.float32(params.min_p)]
    elif params.min_p > 0.0:
        ids = np.flatnonzero(weights >= np.float32(params.min_p))
    else:
        ids = None
    values = weights if ids is None else weights[ids]
    if params.top_p < 1.0:
        kept = nucleus(values, params.top_p)
        ids, values = kept if ids is None else ids[kept], values[kept]
    if ids is not None:
        weights[:] = 0
        weights[ids] = values


def largest(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest values, ascending; of equal values the first ones."""
    if count >= len(values):
        return np.arange(len(values))
    if count <= 0:
        return np.zeros(0, np.int64)
    blocks = len(values) // _BLOCK
    if count < blocks:
        # The count-th largest of the blocks' maxima cannot be above the count-th largest value: few are left to order.
        maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        candidates = np.flatnonzero(values >= _kth_largest(maxima, count))
        few = values[candidates]
        return candidates[_at_least(few, _kth_largest(few, count), count)]
    return _at_least(values, _kth_largest(values, count), count)


def nucleus(values: Floats, top_p: float) -> Ids:
    """Indices of the shortest beginning that holds at least `top_p` of the sum, ascending; never empty."""
    total = float(values.sum(dtype=np.float64))
    # What is not above this bound sums up to at most 1 - top_p, so the nucleus is complete without it.
    candidates = np.flatnonzero(values > (1.0 - top_p) * total / len(values))
    if len(candidates) == 0:
        return largest(values, 1)
    values = values[candidates]
    count, edge = _reach(np.sort(values)[::-1], top_p * total)
    return candidates[_at_least(values, edge, count)]


def _reach(descending: Floats, wanted: float) -> tuple[int, np.float32]:
    """How many of the values it takes to reach the sum, and the last of these values."""
    sums = np.cumsum(np.add.reduceat(descending, np.arange(0, len(descending), _BLOCK), dtype=np.float64))
    block = min(int(np.searchsorted(sums, wanted)), len(sums) - 1)
    start = block * _BLOCK
    before = float(sums[block - 1]) if block else 0.0
    inside = before + np.cumsum(descending[start : start + _BLOCK], dtype=np.float64)
    count = min(start + int(np.searchsorted(inside, wanted)) + 1, len(descending))
    return count, descending[count - 1]


def _kth_largest(values: Floats, count: int) -> np.float32:
    cut = len(values) - count
    return np.partition(values, cut)[cut]  # type: ignore[no-any-return]


def _at_least(values: Floats, edge: np.float32, count: int) -> Ids:
    """Indices of what is above the edge, and of as many at the edge, first come first kept, as make up the count."""
    above = values > edge
    ties = np.flatnonzero(values == edge)[: count - np.count_nonzero(above)]
    above[ties] = True
    return np.flatnonzero(above)
