"""Small parts of graphs: constants, slices, factors, activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops
from openvino.op import Constant

Node = Any
"""An OpenVINO graph node; the package has no types of its own for mypy."""


def _gelu_tanh(x: Node) -> Node:
    return ops.gelu(x, "tanh")


ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "silu": ops.swish,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu": lambda x: ops.gelu(x, "erf"),
    "relu": ops.relu,
    "relu2": lambda x: ops.power(ops.relu(x), f32(2.0)),
}


def xielu(x: Node, up: Node, down: Node, beta: Node, least: Node) -> Node:
    """Above 0 a parabola, below it an exponential (arXiv:2411.13010). `up`, `down`: of one number each, in front of
    softplus."""
    straight = ops.multiply(x, beta)
    above = ops.multiply(ops.multiply(x, x), ops.softplus(up))
    below = ops.subtract(ops.subtract(ops.exp(ops.minimum(x, least)), f32(1.0)), x)
    below = ops.multiply(below, ops.add(ops.softplus(down), beta))
    return ops.add(ops.select(ops.greater(x, f32(0.0)), above, below), straight)


def constant(values: npt.NDArray[Any], shape: Sequence[int], dtype: ov.Type) -> Node:
    """That looks into `values`, and does not keep it alive."""
    return Constant(ov.Tensor(values, ov.Shape(list(shape)), dtype), True)


def f32(value: object) -> Node:
    return ops.constant(np.asarray(value, np.float32))


def i32(value: object) -> Node:
    return ops.constant(np.asarray(value, np.int32))


def i64(value: object) -> Node:
    return ops.constant(np.asarray(value, np.int64))


def part(x: Node, begin: int, end: int) -> Node:
    """From `begin` up to, but not including, `end`, of the last axis of four."""
    return ops.slice(x, i64([begin]), i64([end]), i64([1]), i64([3]))


def parts(x: Node, sizes: Sequence[int], axis: int) -> list[Node]:
    """One after another along an axis."""
    one, along = i64([1]), i64([axis])
    return [ops.slice(x, i64([begin]), i64([end]), one, along) for begin, end in pairwise(accumulate(sizes, initial=0))]


def scaled(x: Node, factor: float) -> Node:
    return x if factor == 1.0 else ops.multiply(x, f32(factor))


def capped(x: Node, cap: float) -> Node:
    """cap * tanh(x / cap); 0: x as it is."""
    return ops.multiply(ops.tanh(ops.multiply(x, f32(1 / cap))), f32(cap)) if cap else x


def sparse(x: Node, share: float) -> Node:
    """`MLP.sparsity`, along the last axis of [T, n]."""
    mean = ops.reduce_mean(x, i64([-1]), True)
    variance = ops.reduce_mean(ops.power(ops.subtract(x, mean), f32(2.0)), i64([-1]), True)
    deviation = scaled(ops.sqrt(variance), NormalDist().inv_cdf(share))
    return ops.relu(ops.subtract(x, ops.add(mean, deviation)))


def limited(x: Node, limit: float) -> Node:
    """x, no farther from zero than `limit`; 0: x as it is."""
    return ops.clamp(x, -limit, limit) if limit else x


def rms(x: Node, eps: float) -> Node:
    """x with a mean square of 1 along its last axis."""
    variance = ops.reduce_mean(ops.power(x, f32(2.0)), i64([-1]), True)
    return ops.multiply(x, ops.divide(f32(1.0), ops.sqrt(ops.add(variance, f32(eps)))))
