"""Mixtures of experts in a graph: which experts a token has, by what weights, and their results together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino.opset15 as ops

from penstock.engines.openvino.decoder_spec import Clamp, ExpertGroups, Experts
from penstock.engines.openvino.graph_nodes import Node, f32, i32, i64, parts, scaled


def mix(
    x: Node,
    logits: Node,
    experts: Experts,
    expert: Callable[[Node, int], Node],
    correction: Node | None = None,
    scales: Node | None = None,
) -> Node:
    """x [T, hidden size] through the experts that `logits` [T, count] choose. `expert`: one's result, by its rows and
    its number. `correction` [count]: as `TensorNames.correction`. `scales` [count], of the weights.

    The rows are sorted by expert and split, so that each expert is an MLP over its own rows: the plugin passes by what
    has no rows, reads the weights of chosen experts only, and multiplies them as it multiplies other matrices, in 8 and
    4 bits, too. (Its operation for experts multiplies row by row: prompts take five times as long.)
    """
    weights, chosen = _choose(logits, experts, correction)
    if experts.normalized:
        total = ops.reduce_sum(weights, i64([-1]), True)
        weights = ops.divide(weights, ops.maximum(total, f32(experts.least_sum)) if experts.least_sum else total)
    weights = scaled(weights, experts.scale)
    if scales is not None:
        weights = ops.multiply(weights, ops.gather(scales, chosen, i64(0)))
    chosen = ops.reshape(chosen, i64([-1]), False)
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


def _choose(logits: Node, experts: Experts, correction: Node | None) -> tuple[Node, Node]:
    """Weights, not yet normalized, and numbers of the chosen, [T, per_token] each."""
    if experts.scores == "sparse mixer":
        return _sparsely_mixed(logits, experts.jitter)
    scores = logits if experts.weighs_inputs else _SCORES[experts.scores](logits)
    ranked = scores if correction is None else ops.add(scores, correction)
    if experts.groups is not None:
        ranked = _in_best_groups(ranked, experts.groups)
    top = ops.topk(ranked, i64(experts.per_token), -1, "max", "value", "i32")
    chosen = top.output(1)
    return top.output(0) if ranked is scores else ops.gather_elements(scores, chosen, 1), chosen


def _in_best_groups(scores: Node, groups: ExpertGroups) -> Node:
    """[T, count], the least number for experts of other groups."""
    by_group = ops.reshape(scores, i64([0, groups.count, -1]), True)
    best = ops.topk(by_group, i64(groups.best), -1, "max", "value", "i32").output(0)
    totals = ops.reduce_sum(best, i64([-1]), False)
    chosen = ops.topk(totals, i64(groups.chosen), -1, "max", "value", "i32").output(1)
    is_chosen = ops.equal(ops.unsqueeze(chosen, i64(2)), i32(np.arange(groups.count)))
    is_chosen = ops.unsqueeze(ops.reduce_logical_or(is_chosen, i64([1]), False), i64(2))
    return ops.reshape(ops.select(is_chosen, by_group, f32(np.finfo(np.float32).min)), ops.shape_of(scores), False)


_SCORES: dict[str, Callable[[Node], Node]] = {"softmax": lambda x: ops.softmax(x, -1), "sigmoid": ops.sigmoid}


def _sparsely_mixed(logits: Node, jitter: float) -> tuple[Node, Node]:
    """The best two. Each one's weight is its share among those that are not far below it, and are not better."""
    top = ops.topk(logits, i64(2), -1, "max", "value", "i32")
    best, second = parts(top.output(0), (1, 1), 1)
    count = logits.get_output_partial_shape(0)[1].get_length()
    is_best = ops.equal(i32(np.arange(count)), parts(top.output(1), (1, 1), 1)[0])
    weights = [_share(logits, best, jitter), _share(logits, second, jitter, is_best)]
    return ops.concat(weights, 1), top.output(1)


def _share(logits: Node, chosen: Node, jitter: float, hidden: Node | None = None) -> Node:
    """[T, 1]: of the one with the logit `chosen` [T, 1], without those that are `hidden` [T, count]."""
    distance = ops.divide(ops.subtract(chosen, logits), ops.maximum(ops.absolute(logits), chosen))
    far = ops.greater(distance, f32(2 * jitter))
    dropped = far if hidden is None else ops.logical_or(far, hidden)
    near = ops.select(dropped, f32(0.0), ops.exp(ops.subtract(logits, chosen)))
    return ops.divide(f32(1.0), ops.reduce_sum(near, i64([1]), True))


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
    experts = i32(np.arange(count))
    ends, begins = (ops.search_sorted(numbers, experts, right, "i64") for right in (True, False))
    return ops.subtract(ends, begins)
