"""How far distributions over the next token are from each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROWS_AT_A_TIME = 32
"""Bounds the memory: each takes a few arrays of the vocabulary's size in 64 bits."""

Doubles = npt.NDArray[np.float64]


def kl_divergences(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> Doubles:
    """[N], in nats: what of the information in softmax(reference) is lost with softmax(other), of logits [N, vocab]."""
    found = [
        _divergences(reference[start : start + _ROWS_AT_A_TIME], other[start : start + _ROWS_AT_A_TIME])
        for start in range(0, len(reference), _ROWS_AT_A_TIME)
    ]
    return np.concatenate(found) if found else np.zeros(0)


def _divergences(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> Doubles:
    p, q = _log_softmax(reference), _log_softmax(other)
    lost: Doubles = (np.exp(p) * (p - q)).sum(axis=1)
    return np.maximum(lost, 0.0)  # rounding may leave less than nothing


def _log_softmax(logits: npt.NDArray[np.float32]) -> Doubles:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
