"""Whether two answers are the same."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.classic.tensors import Tensor
from penstock.gateway.configuration.traffic_rules import ShadowRule
from penstock.gateway.models.traffic.shadows import same_tensors

EXACT, LOOSE = ShadowRule("s"), ShadowRule("s", absolute_tolerance=0.01, relative_tolerance=0.1)


def floats(*values: float, name: str = "Y") -> Tensor:
    return Tensor(name, "FP32", np.array(values, np.float32))


def texts(*values: bytes) -> Tensor:
    return Tensor("T", "BYTES", np.array(values, np.object_))


@pytest.mark.parametrize(
    ("ours", "theirs", "exact", "loose"),
    [
        ([floats(1, 2)], [floats(1, 2)], True, True),
        ([floats(1, float("nan"))], [floats(1, float("nan"))], True, True),
        ([floats(1, float("inf"))], [floats(1, -float("inf"))], False, False),
        ([floats(10)], [floats(10.9)], False, True),
        ([floats(10)], [floats(11.2)], False, False),
        ([floats(0)], [floats(0.009)], False, True),
        ([floats(1)], [floats(1, 1)], False, False),
        ([floats(1)], [floats(1, name="Z")], False, False),
        ([floats(1)], [floats(1), floats(1, name="Z")], False, False),
        ([floats(1), floats(2, name="Z")], [floats(2, name="Z"), floats(1)], True, True),
        ([texts(b"one", b"two")], [texts(b"one", b"two")], True, True),
        ([texts(b"one")], [texts(b"two")], False, False),
        (
            [Tensor("I", "INT64", np.array([2**53]))],
            [Tensor("I", "INT64", np.array([2**53 + 1]))],
            False,
            True,
        ),
        ([Tensor("B", "BOOL", np.array([True]))], [Tensor("B", "BOOL", np.array([False]))], False, False),
        ([floats(1)], [Tensor("Y", "FP64", np.array([1.0]))], False, False),
        ([], [], True, True),
    ],
)
def test_same_tensors(ours: list[Tensor], theirs: list[Tensor], exact: bool, loose: bool) -> None:
    assert same_tensors(ours, theirs, EXACT) is exact
    assert same_tensors(ours, theirs, LOOSE) is loose
