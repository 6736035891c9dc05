"""Which tokens may be drawn: top-k, min-p and top-p without sorting the vocabulary.

Each of them keeps a prefix of the tokens ordered by probability, ties broken by the smaller id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, ascending by id; of equal values the smaller ids."""
    if count >= len(values):
        return np.arange(len(values))
    if count <= 0:
        return np.zeros(0, np.int64)
    cut = len(values) - count
    edge = np.partition(values, cut)[cut]
    above = np.flatnonzero(values > edge)
    ties = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate([above, ties]))


def nucleus(weights: Floats, top_p: float) -> Ids:
    """Ids of the smallest prefix that holds at least `top_p` of the sum of `weights`, ascending by id; never empty."""
    total = float(weights.sum(dtype=np.float64))
    # What is not above this bound sums up to at most 1 - top_p, so the prefix is complete without it.
    ids = np.flatnonzero(weights > (1.0 - top_p) * total / len(weights))
    if len(ids) == 0:
        ids = np.arange(len(weights))
    order = ids[np.lexsort((ids, -weights[ids]))]
    sums = np.cumsum(weights[order], dtype=np.float64)
    kept = int(np.searchsorted(sums, top_p * total)) + 1
    return np.sort(order[:kept])
