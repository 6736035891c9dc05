"""Rows of texts of different lengths in one batch, and attention within them.

What is computed for each token by itself is computed for all tokens one after another, [T, ...]: nothing is padded.
Only attention and pooling see a row for each text, padded to the longest, [B, S, ...]. Mixed lengths take half the time
of a batch that is padded throughout; equal ones take the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.encoder.families import EncoderSpec
from penstock.engines.encoder.text import TokenizedText
from penstock.engines.openvino.graph_nodes import Node, f32, i64
from penstock.engines.openvino.rope import Rope

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


class TextRows:
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


_NEVER = -1e30
"""Added where a token does not attend. Not infinity: a row of padding may attend to nothing at all."""
_WRITTEN_OUT_TOKENS = 512
"""Models with texts up to so long have attention as products of matrices, which is up to a fifth faster for short
texts. For longer ones the scores of a batch would take gigabytes."""
_MAX_DISTANCE = 128
"""MPNet puts all distances from here on into one bucket."""


class TextAttention:
    def __init__(self, spec: EncoderSpec, rows: TextRows, distance_table: Node | None = None) -> None:
        """`distance_table`: the bias of each head [buckets, heads], by `spec.distance_buckets`."""
        self._spec = spec
        self._rows = rows
        self._masks = {0: self._mask(0)}
        if distance_table is not None:
            self._masks[0] = ops.add(self._masks[0], self._distance_bias(distance_table))
        self._turns: dict[Rope, tuple[Node, Node]] = {}

    def __call__(self, q: Node, k: Node, v: Node, *, window: int = 0, rope: Rope | None = None) -> Node:
        """All [T, hidden size], as is the result."""
        spec, rows = self._spec, self._rows
        if rope is not None:
            q, k = self._rotate(q, rope), self._rotate(k, rope)
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        y = self._attend(self._heads(q), self._heads(k), self._heads(v), self._masks[window])
        return rows.collect(ops.transpose(y, i64([0, 2, 1, 3])), spec.hidden_size)

    def _attend(self, q: Node, k: Node, v: Node, mask: Node) -> Node:
        if self._spec.max_tokens > _WRITTEN_OUT_TOKENS:
            return ops.scaled_dot_product_attention(q, k, v, mask)
        scores = ops.multiply(ops.matmul(q, k, False, True), f32(self._spec.head_dim**-0.5))
        return ops.matmul(ops.softmax(ops.add(scores, mask), -1), v, False, False)

    def _heads(self, x: Node) -> Node:
        """[T, hidden size] as [B, heads, S, head_dim]."""
        x = ops.reshape(self._rows.spread(x), i64([0, 0, self._spec.num_heads, self._spec.head_dim]), True)
        return ops.transpose(x, i64([0, 2, 1, 3]))

    def _mask(self, window: int) -> Node:
        """[B, 1, 1, S], or [B, 1, S, S] with a window."""
        allowed = ops.unsqueeze(self._rows.present, i64([1, 2]))
        if window:
            near = ops.less_equal(ops.abs(self._distances()), i64(window))
            allowed = ops.logical_and(allowed, ops.unsqueeze(near, i64([0, 1])))
        return ops.select(allowed, f32(0), f32(_NEVER))

    def _distances(self) -> Node:
        """[S, S]: how far each column's token lies behind each row's."""
        columns = self._rows.columns
        return ops.subtract(ops.unsqueeze(columns, i64(0)), ops.unsqueeze(columns, i64(1)))

    def _distance_bias(self, table: Node) -> Node:
        """[1, heads, S, S]."""
        longest = self._spec.max_tokens
        of_distance = i64(_distance_buckets(np.arange(-longest, longest + 1), self._spec.distance_buckets))
        buckets = ops.gather(of_distance, ops.add(self._distances(), i64(longest)), i64(0))
        bias = ops.transpose(ops.gather(table, buckets, i64(0)), i64([2, 0, 1]))
        return ops.unsqueeze(bias, i64(0))

    def _rotate(self, x: Node, rope: Rope) -> Node:
        spec = self._spec
        if rope not in self._turns:
            self._turns[rope] = self._rotations(rope)
        cos, sin = self._turns[rope]
        x = ops.reshape(x, i64([0, spec.num_heads, spec.head_dim]), True)
        first, second = ops.split(x, i64(2), 2).outputs()
        turned = ops.concat([ops.multiply(second, f32(-1)), first], -1)
        x = ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))
        return ops.reshape(x, i64([0, spec.hidden_size]), True)

    def _rotations(self, rope: Rope) -> tuple[Node, Node]:
        """cos and sin of every token's angles, [T, 1, head_dim]."""
        positions = ops.unsqueeze(ops.convert(self._rows.inputs["positions"], "f32"), i64([1, 2]))
        angles = ops.multiply(positions, f32(np.concatenate([rope.inv_freq, rope.inv_freq])[None, None]))
        factor = f32(rope.attention_factor)
        return ops.multiply(ops.cos(angles), factor), ops.multiply(ops.sin(angles), factor)


def _distance_buckets(distances: np.ndarray, count: int) -> np.ndarray:
    """T5's rule, as MPNet has it: half of the buckets for each direction, half of those for one distance each, the
    others ever wider."""
    half = count // 2
    exact = half // 2
    size = np.abs(distances)
    # as torch computes it: in float32, cut and not rounded
    far = np.log(np.maximum(size, 1).astype(np.float32) / exact) / math.log(_MAX_DISTANCE / exact) * (half - exact)
    wide = np.minimum(exact + far.astype(np.int64), half - 1)
    buckets: np.ndarray = np.where(distances > 0, half, 0) + np.where(size < exact, size, wide)
    return buckets
