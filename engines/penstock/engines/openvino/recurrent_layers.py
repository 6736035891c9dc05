"""Recurrent layers of a decoder's graph, with their matrices: short convolutions, gated delta nets, state spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, GatedDelta, Mamba2, Recurrent, ShortConvolution
from penstock.engines.openvino.delta_prompts import prompt_delta_net
from penstock.engines.openvino.graph_nodes import Node, f32, i64, parts, rms, scaled
from penstock.engines.openvino.recurrent import (
    CONV_TABLE,
    DELTA_TABLE,
    KEPT_STATES,
    paged_convolution,
    paged_delta_net,
)
from penstock.engines.openvino.weights import Weights


class RecurrentLayers:
    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        precision: str,
        inputs: Mapping[str, Node],
        add_input: Callable[[str, object, list[int]], Node],
        linear: Callable[[Node, str, int, int, bool], Node],
    ) -> None:
        """`precision` of the computation: that of the tables of states, too. `inputs` and `add_input` are those of the
        graph; `linear`: x through the matrix of a name, which gives so many values out of so many, with a bias or
        without."""
        self._spec = spec
        self._weights = weights
        self._precision = precision
        self._inputs = inputs
        self._add_input = add_input
        self._linear = linear
        self.kept: list[Node] = []
        """Results with states, which go into tables."""

    def layer(self, x: Node, n: int, mixer: Recurrent) -> Node:
        """x [T, hidden size] through the recurrent part of layer n."""
        if isinstance(mixer, ShortConvolution):
            return self._convolution(x, n, mixer)
        return self._delta_net(x, n, mixer) if isinstance(mixer, GatedDelta) else self._state_space(x, n, mixer)

    def _convolution(self, x: Node, n: int, layer: ShortConvolution) -> Node:
        names, hidden = self._spec.names, self._spec.hidden_size
        prefix = f"{names.layers}.{n}.{names.convolution}."
        matrix = self._linear(x, prefix + "in_proj", 3 * hidden, hidden, layer.bias)
        before, behind, values = parts(matrix, (hidden,) * 3, 1)
        table = self._add_input(f"{CONV_TABLE}{n}", ov.Type.dynamic, [-1, hidden, layer.kernel])
        kernel = self._weights.table(prefix + "conv.weight", (hidden, 1, layer.kernel))
        bias = self._weights.vector(prefix + "conv.bias", hidden) if layer.bias else None
        y = paged_convolution(ops.multiply(before, values), table, kernel, bias, self._inputs)
        return self._linear(ops.multiply(behind, y), prefix + "out_proj", hidden, hidden, layer.bias)

    def _delta_net(self, x: Node, n: int, layer: GatedDelta) -> Node:
        hidden, heads, names = self._spec.hidden_size, layer.value_heads, layer.names
        key_heads = heads if layer.tiled else layer.key_heads
        prefix = f"{self._spec.names.layers}.{n}.{self._spec.names.delta_net}."
        qkv, gate, beta, step = self._operands(x, prefix, layer)
        qkv = self._folded(qkv, n, prefix, sum(layer.sizes), layer.kernel, names.convolutions)
        q, k, v = parts(qkv, layer.sizes, 1)
        q, k = (_unit(ops.reshape(rows, i64([0, layer.key_heads, layer.key_dim]), True)) for rows in (q, k))
        if layer.tiled:
            q, k = (ops.tile(rows, i64([1, heads // layer.key_heads, 1])) for rows in (q, k))
        v = ops.reshape(v, i64([0, heads, layer.value_dim]), True)
        decay, _ = self._decay(step, prefix, heads)
        strength = scaled(ops.sigmoid(beta), layer.strength)
        sizes = key_heads, heads, layer.key_dim, layer.value_dim
        y = self._delta_rule(n, (q, k, v), decay, strength, sizes)
        y = rms(y, layer.norm_eps or self._spec.norm_eps)
        y = ops.multiply(y, self._weights.vector(f"{prefix}{names.norm}.weight", layer.value_dim))
        y = ops.multiply(ops.reshape(y, i64([0, layer.sizes[2]]), True), ops.swish(gate))
        return self._linear(y, prefix + names.out, hidden, layer.sizes[2], False)

    def _decay(self, step: Node, prefix: str, heads: int) -> tuple[Node, Node]:
        """By how much states decay, a logarithm, and the step of each head, [T, heads] both."""
        step = ops.softplus(ops.add(step, self._weights.vector(prefix + "dt_bias", heads)))
        pace = ops.negative(ops.exp(self._weights.vector(prefix + "A_log", heads)))
        return ops.multiply(pace, step), step

    def _operands(self, x: Node, prefix: str, layer: GatedDelta) -> list[Node]:
        """Queries, keys and values together, gates, betas, and what decays are made of."""
        names, heads, gate = layer.names, layer.value_heads, layer.sizes[2]
        if layer.by_key_head:
            *qkv, gates = self._by_key_head(x, prefix + names.qkv[0], layer, (*layer.sizes, gate))
            return [ops.concat(qkv, 1), gates, *self._by_key_head(x, prefix + names.beta, layer, (heads, heads))]
        sizes = layer.sizes if len(names.qkv) > 1 else (sum(layer.sizes),)
        hidden = self._spec.hidden_size
        qkv = [self._linear(x, prefix + name, size, hidden, False) for name, size in zip(names.qkv, sizes, strict=True)]
        rest = ((names.gate, gate), (names.beta, heads), (names.decay, heads))
        joined = ops.concat(qkv, 1) if len(qkv) > 1 else qkv[0]
        return [joined, *(self._linear(x, prefix + name, size, hidden, False) for name, size in rest)]

    def _by_key_head(self, x: Node, name: str, layer: GatedDelta, sizes: tuple[int, ...]) -> list[Node]:
        """Parts [T, size] of a matrix that has the rows of all of them for each head of keys."""
        heads = layer.key_heads
        y = self._linear(x, name, sum(sizes), self._spec.hidden_size, False)
        y = ops.reshape(y, i64([0, heads, sum(sizes) // heads]), True)
        own = parts(y, [size // heads for size in sizes], 2)
        return [ops.reshape(rows, i64([0, size]), True) for rows, size in zip(own, sizes, strict=True)]

    def _folded(
        self, x: Node, n: int, prefix: str, size: int, kernel: int, names: Sequence[str], bias: bool = False
    ) -> Node:
        """x [T, size] over the newest tokens, activated; `names`: of the kernels."""
        table = self._add_input(f"{CONV_TABLE}{n}", ov.Type.dynamic, [-1, size, kernel])
        kernels = self._weights.rows([f"{prefix}{name}.weight" for name in names], (size, 1, kernel))
        added = self._weights.vector(f"{prefix}{names[0]}.bias", size) if bias else None
        return ops.swish(paged_convolution(x, table, kernels, added, self._inputs))

    def _delta_rule(
        self, n: int, qkv: tuple[Node, Node, Node], decay: Node, beta: Node, sizes: tuple[int, int, int, int]
    ) -> Node:
        """Operands as `paged_delta_net` has them; `sizes`: heads of keys and of values, and of one of each."""
        _, heads, key_dim, value_dim = sizes
        table = self._add_input(f"{DELTA_TABLE}{n}", ov.Type.dynamic, [-1, heads, value_dim, key_dim])
        y = paged_delta_net(*qkv, table, decay, beta, self._inputs)
        y, kept = prompt_delta_net(y, qkv, table, decay, beta, sizes, self._inputs)
        self.kept.append(ops.result(ops.convert(kept, self._precision)))
        self.kept[-1].output(0).set_names({f"{KEPT_STATES}{n}"})
        return y

    def _state_space(self, x: Node, n: int, layer: Mamba2) -> Node:
        """A delta net with keys so short that what its state knows already does not matter: then it adds to the state
        what a state space adds. With keys e * k and values v / e, strength * k * (v - e * e * state * k); e * e is far
        below what a float32 can tell from 1."""
        if self._precision == "f16":
            raise UnsupportedError("dtype=f16 has too small a range for state spaces; use bf16 or f32", param="dtype")
        hidden, heads, inner = self._spec.hidden_size, layer.heads, layer.inner
        prefix = f"{self._spec.names.layers}.{n}.{self._spec.names.state_space}."
        sizes = (inner, sum(layer.sizes), heads)
        both = scaled(x, layer.input_scale)
        both = _scaled_parts(self._linear(both, prefix + "in_proj", sum(sizes), hidden, layer.bias), layer)
        gate, folded, step = parts(both, sizes, 1)
        folded = self._folded(folded, n, prefix, sum(layer.sizes), layer.kernel, ("conv1d",), layer.kernel_bias)
        v, k, q = parts(folded, layer.sizes, 1)
        k, q = (ops.reshape(rows, i64([0, layer.groups, layer.state_dim]), True) for rows in (k, q))
        v = ops.reshape(v, i64([0, heads, layer.head_dim]), True)
        decay, step = self._decay(step, prefix, heads)
        q, k, values = scaled(q, layer.state_dim**0.5), scaled(k, _SHORT), scaled(v, 1 / _SHORT)
        y = self._delta_rule(n, (q, k, values), decay, step, (layer.groups, heads, layer.state_dim, layer.head_dim))
        own = ops.reshape(self._weights.vector(prefix + "D", heads), i64([1, heads, 1]), False)
        y = ops.reshape(ops.add(y, ops.multiply(v, own)), i64([0, inner]), True)
        y = self._gated(y, ops.swish(gate), prefix, layer)
        return scaled(self._linear(y, prefix + "out_proj", hidden, inner, layer.out_bias), layer.output_scale)

    def _gated(self, y: Node, gate: Node, prefix: str, layer: Mamba2) -> Node:
        """y and `gate` [T, inner]. The norm is of each group of heads."""
        if layer.norm != "norm first":
            y = ops.multiply(y, gate)
        if layer.norm == "gate alone":
            return y
        y = ops.reshape(y, i64([0, layer.groups, layer.inner // layer.groups]), True)
        y = ops.reshape(rms(y, self._spec.norm_eps), i64([0, layer.inner]), True)
        y = ops.multiply(y, self._weights.vector(prefix + "norm.weight", layer.inner))
        return ops.multiply(y, gate) if layer.norm == "norm first" else y


def _scaled_parts(y: Node, layer: Mamba2) -> Node:
    """y [T, all that the first matrix gives]"""
    if set(layer.part_scales) == {1.0}:
        return y
    sizes = (layer.inner, *layer.sizes, layer.heads)
    return ops.multiply(y, f32(np.repeat(np.array(layer.part_scales, np.float32), sizes)))


_SHORT = 2.0**-20
"""A power of 2, by which nothing is rounded."""
_LEAST_SQUARE = 1e-6


def _unit(x: Node) -> Node:
    """x with a length of 1 along its last axis."""
    square = ops.reduce_sum(ops.multiply(x, x), i64([-1]), True)
    return ops.divide(x, ops.sqrt(ops.add(square, f32(_LEAST_SQUARE))))
