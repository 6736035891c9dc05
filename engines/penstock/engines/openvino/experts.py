"""Mixtures of experts: each token's rows go to the experts that its router chose, and come back weighted.

The rows are sorted by expert and split, so that each expert is an MLP over its own rows: the plugin passes by what has
no rows, reads the weights of chosen experts only, and multiplies them as it multiplies other matrices, in 8 and 4 bits,
too. (Its operation for experts multiplies row by row: prompts take five times as long.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino.opset15 as ops

from penstock.engines.openvino.decoder_spec import Clamp, Experts
from penstock.engines.openvino.graph_nodes import f32, i32, i64
from penstock.engines.openvino.weights import Node


def mix(x: Node, logits: Node, experts: Experts, expert: Callable[[Node, int], Node]) -> Node:
    """x [T, hidden size] through the experts that `logits` [T, count] choose. `expert`: one's result, by its rows and
    its number."""
    scores = logits if experts.weighs_inputs else ops.softmax(logits, -1)
    top = ops.topk(scores, i64(experts.per_token), -1, "max", "value", "i32")
    weights, chosen = top.output(0), ops.reshape(top.output(1), i64([-1]), False)
    if experts.normalized:
        weights = ops.divide(weights, ops.reduce_sum(weights, i64([-1]), True))
    size = ops.gather(ops.shape_of(chosen), i64(0), i64(0))
    by_expert = ops.topk(chosen, size, 0, "min", "value", "i32")
    numbers, order = by_expert.output(0), by_expert.output(1)
    rows = ops.gather(x, ops.divide(order, i32(experts.per_token)), i64(0))
    if experts.weighs_inputs:
        in_order = ops.gather(ops.reshape(ops.sigmoid(weights), i64([-1, 1]), False), order, i64(0))
        rows = ops.multiply(rows, in_order)
    of_each = ops.variadic_split(rows, i64(0), _counts(numbers, experts.count))
    results = ops.concat([expert(of_each.output(n), n) for n in range(experts.count)], 0)
    places = ops.scatter_elements_update(order, order, ops.range(i32(0), size, i32(1), "i32"), i64(0))
    back = ops.gather(results, ops.reshape(places, i64([-1, experts.per_token]), False), i64(0))
    if not experts.weighs_inputs:
        back = ops.multiply(back, ops.unsqueeze(weights, i64(2)))
    return ops.reduce_sum(back, i64([1]), False)


def alternating(both: Node) -> list[Node]:
    """[rows, 2 * inner] as two of [rows, inner], whose columns alternate."""
    return [ops.slice(both, i64([first]), i64([np.iinfo(np.int64).max]), i64([2]), i64([1])) for first in (0, 1)]


def clamped(gate: Node, up: Node, clamp: Clamp) -> Node:
    """[rows, inner] each."""
    gate = ops.minimum(gate, f32(clamp.limit))
    up = ops.add(ops.clamp(up, -clamp.limit, clamp.limit), f32(1.0))
    return ops.multiply(up, ops.multiply(gate, ops.sigmoid(ops.multiply(gate, f32(clamp.alpha)))))


def _counts(numbers: Node, count: int) -> Node:
    """How often each of 0 .. count - 1 occurs in `numbers`, which are sorted."""
    each = i32(np.arange(count))
    ends, begins = (ops.search_sorted(numbers, each, right, "i64") for right in (True, False))
    return ops.subtract(ends, begins)
