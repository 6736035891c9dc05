"""What stands behind an encoder, as sentence-transformers' modules have it: most often one vector for each text."""

from __future__ import annotations

from collections.abc import Callable

import openvino.opset15 as ops

from penstock.engines.encoder.layout import Rows, i64
from penstock.engines.encoder.sentence_files import SentenceRecipe
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.weights import Node, Weights

ACTIVATE: dict[str, Callable[[Node], Node]] = {
    "": lambda x: x,
    "gelu": lambda x: ops.gelu(x, "erf"),
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "relu": ops.relu,
    "silu": ops.swish,
    "tanh": ops.tanh,
}


def text_vectors(x: Node, size: int, rows: Rows, recipe: SentenceRecipe) -> Node:
    """[T, size] to [B, size of the vectors], not normalised; without a pooling to [T, size of the vectors]. Raises
    UnsupportedError for a dense layer that does not take what comes before it."""
    parts = [_pooled(x, mode, rows) for mode in recipe.pooling] or [x]
    pooled = parts[0] if len(parts) == 1 else ops.concat(parts, 1)
    size *= len(parts)
    for dense in recipe.dense:
        if dense.in_features != size:
            raise UnsupportedError(f"{dense.folder.name} takes {dense.in_features} numbers, not {size}")
        stored = Weights(Checkpoint(dense.folder), "f32")
        shape = (dense.out_features, dense.in_features)
        # copied: nothing would keep the mapped file alive
        pooled = ops.matmul(pooled, stored.table("linear.weight", shape), False, True)
        if dense.bias:
            pooled = ops.add(pooled, stored.vector("linear.bias", dense.out_features))
        pooled, size = ACTIVATE[dense.activation](pooled), dense.out_features
    return pooled


def _pooled(x: Node, mode: str, rows: Rows) -> Node:
    if mode == "cls":
        return rows.first(x)
    if mode == "lasttoken":
        return rows.last(x)
    if mode == "max":
        return rows.largest(x)
    if mode == "mean":
        return rows.mean(x)
    present = ops.convert(rows.present, "f32")
    if mode == "mean_sqrt_len":
        return ops.divide(rows.weighted_sum(x, present), ops.sqrt(rows.lengths()))
    # weightedmean: a token's weight is its place, counted from 1
    weights = ops.multiply(present, ops.convert(ops.add(rows.columns, i64(1)), "f32"))
    return ops.divide(rows.weighted_sum(x, weights), ops.reduce_sum(weights, i64([1]), True))
