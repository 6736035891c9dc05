"""Whether two answers are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.classic.tensors import Tensor
from penstock.gateway.configuration.traffic_rules import ShadowRule


def same_tensors(answered: Sequence[Tensor], other: Sequence[Tensor], rule: ShadowRule) -> bool:
    """The same outputs in any order: equal, or numbers within the tolerance. NaN equals NaN."""
    theirs = {tensor.name: tensor for tensor in other}
    if len(theirs) != len(answered):
        return False
    return all(tensor.name in theirs and _same(tensor, theirs[tensor.name], rule) for tensor in answered)


def _same(answered: Tensor, other: Tensor, rule: ShadowRule) -> bool:
    ours, theirs = answered.array, other.array
    if answered.datatype != other.datatype or ours.shape != theirs.shape:
        return False
    if answered.datatype in ("BYTES", "BOOL"):
        return bool((ours == theirs).all())
    if not (rule.absolute_tolerance or rule.relative_tolerance) and ours.dtype.kind in "iu":
        return bool(np.array_equal(ours, theirs))
    wide_ours, wide_theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return bool(
        np.allclose(wide_theirs, wide_ours, rtol=rule.relative_tolerance, atol=rule.absolute_tolerance, equal_nan=True)
    )
