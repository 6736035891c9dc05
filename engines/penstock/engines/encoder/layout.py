"""Texts of different lengths in one batch.

What is computed for each token by itself is computed for all tokens one after another, [T, ...]: nothing is padded.
Only attention and pooling see a row for each text, padded to the longest, [B, S, ...]. Mixed lengths take half the time
of a batch that is padded throughout; equal ones take the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.openvino.weights import Node

ROUNDED_TO = 16
"""T and S are made a multiple of this: OpenVINO compiles kernels for each new shape."""

INPUTS: dict[str, tuple[type[np.generic], list[int]]] = {
    "input_ids": (np.int64, [-1]),
    "token_types": (np.int64, [-1]),
    "positions": (np.int64, [-1]),
    "slots": (np.int64, [-1, -1]),
    "places": (np.int64, [-1]),
    "lengths": (np.int64, [-1]),
}
"""slots [B, S]: which of the T tokens lies there, 0 behind a text's end; places [T]: where each token lies in the B * S
slots; lengths [B]: tokens of each text."""


def batch_inputs(texts: Sequence[TokenizedText], max_tokens: int) -> dict[str, np.ndarray]:
    """For each of INPUTS its array. No text is empty, or longer than `max_tokens`: a row is not padded beyond that,
    since an exported graph has no positions for more."""
    lengths = np.array([len(text) for text in texts], np.int64)
    begins = np.cumsum(lengths) - lengths
    num_tokens, longest = _rounded(int(lengths.sum())), min(_rounded(int(lengths.max())), max_tokens)
    columns = np.arange(longest)
    present = columns < lengths[:, None]
    ids, types, positions, places = np.zeros((4, num_tokens), np.int64)
    filled = np.flatnonzero(present)
    count = len(filled)
    places[:count] = filled
    positions[:count] = filled % longest
    ids[:count] = np.concatenate([np.asarray(text.ids, np.int64) for text in texts])
    for text, begin in zip(texts, begins, strict=True):
        if text.types is not None:
            types[begin : begin + len(text)] = text.types
    slots = np.where(present, begins[:, None] + columns, 0)
    arrays = (ids, types, positions, slots, places, lengths)
    return dict(zip(INPUTS, arrays, strict=True))


def _rounded(count: int) -> int:
    return -(-count // ROUNDED_TO) * ROUNDED_TO


class Rows:
    """The graph's inputs, and the way between tokens and rows."""

    def __init__(self) -> None:
        self.inputs: dict[str, Node] = {}
        for name, (dtype, shape) in INPUTS.items():
            node = ops.parameter(ov.PartialShape(shape), dtype, name=name)
            node.output(0).set_names({name})
            self.inputs[name] = node
        self.columns = ops.range(i64(0), ops.gather(ops.shape_of(self.inputs["slots"]), i64(1), i64(0)), i64(1), "i64")
        self.present = ops.less(self.columns, ops.unsqueeze(self.inputs["lengths"], i64(1)))
        """[B, S]: false behind a text's end."""

    def spread(self, x: Node) -> Node:
        """[T, ...] as [B, S, ...]; behind a text's end stands some token."""
        return ops.gather(x, self.inputs["slots"], i64(0))

    def collect(self, x: Node, size: int) -> Node:
        """[B, S, N] as [T, N]."""
        return ops.gather(ops.reshape(x, i64([-1, size]), False), self.inputs["places"], i64(0))

    def first(self, x: Node) -> Node:
        """The first token of each text, [B, N]."""
        return ops.gather(x, self._first(), i64(0))

    def last(self, x: Node) -> Node:
        ends = ops.add(self._first(), self.inputs["lengths"])
        return ops.gather(x, ops.subtract(ends, i64(1)), i64(0))

    def weighted_sum(self, x: Node, weights: Node) -> Node:
        """[T, N] and [B, S] to [B, N]."""
        return ops.reduce_sum(ops.multiply(self.spread(x), ops.unsqueeze(weights, i64(2))), i64([1]), False)

    def mean(self, x: Node) -> Node:
        return ops.divide(self.weighted_sum(x, ops.convert(self.present, "f32")), self.lengths())

    def largest(self, x: Node) -> Node:
        shown = ops.select(ops.unsqueeze(self.present, i64(2)), self.spread(x), f32(-1e30))
        return ops.reduce_max(shown, i64([1]), False)

    def lengths(self) -> Node:
        """[B, 1], f32."""
        return ops.convert(ops.unsqueeze(self.inputs["lengths"], i64(1)), "f32")

    def _first(self) -> Node:
        return ops.gather(self.inputs["slots"], i64(0), i64(1))


def f32(value: object) -> Node:
    return ops.constant(np.asarray(value, np.float32))


def i64(value: object) -> Node:
    return ops.constant(np.asarray(value, np.int64))
