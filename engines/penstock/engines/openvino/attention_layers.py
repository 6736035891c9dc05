"""Layers of attention in a decoder's graph, with their matrices: queries, keys and values, rotations, gates, and those
that are compressed (`Latent`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import openvino as ov
import openvino.opset15 as ops

from penstock.engines.openvino.attention import paged_attention
from penstock.engines.openvino.decoder_inputs import GROUP_INPUTS, group_suffix
from penstock.engines.openvino.decoder_parts import DecoderParts
from penstock.engines.openvino.decoder_spec import Attention, DecoderSpec, Latent, QueryGrowth
from penstock.engines.openvino.graph_nodes import Node, f32, i32, i64, limited, part, parts, rms, scaled
from penstock.engines.openvino.rope import Frequencies, Rope
from penstock.engines.openvino.weights import Weights


class AttentionLayers:
    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        inputs: Mapping[str, Node],
        add_input: Callable[[str, object, list[int]], Node],
        decoder_parts: DecoderParts,
        turning: Callable[[Rope], tuple[Node, Frequencies]],
        token_kinds: Callable[[int], Node | None],
    ) -> None:
        """`inputs` and `add_input` are those of the graph. `turning`: positions [T, n, 1] i64, and by how much each of
        these turns each pair, [pairs, n]. `token_kinds`: of a layer, as `paged_attention` has them."""
        self._spec = spec
        self._weights = weights
        self._inputs = inputs
        self._add_input = add_input
        self._parts = decoder_parts
        self._turning = turning
        self._token_kinds = token_kinds
        self._turns: dict[Rope, tuple[Node, Node]] = {}
        self._groups = spec.groups
        self._group_of = {layer: number for number, group in enumerate(self._groups) for layer in group.layers}
        self._blocks: dict[tuple[int, int], Node] = {}
        """By group and place: where a layer that is one of several in a slot has its blocks."""
        self._caches: dict[int, tuple[list[Node], Node, Node]] = {}
        """By layer: its caches, and the keys and values of this step's tokens."""

    def layer(self, x: Node, n: int, width: int = 0) -> Node:
        """x [T, width] through the attention of layer n. `width` 0: that of the hidden state."""
        names, hidden, layer = self._spec.names, self._spec.hidden_size, self._spec.attention[n]
        prefix = f"{names.layers}.{n}.{names.attention}."
        if layer.latent is not None:
            return self._latent_attention(x, n, prefix, layer.latent)
        if layer.shares is not None:
            q = self._parts.linear(x, prefix + names.qkv[0], layer.q_size, hidden, layer.qkv_bias)
            q = self._rotate(q, layer, layer.num_heads, prefix + names.q_norm)
            y = self._shared_attention(q, n, layer.shares)
            return self._parts.linear(y, prefix + names.o, hidden, layer.q_size, layer.o_bias)
        gate_name = names.attention_gate
        of_queries = layer.q_size * (2 if layer.gated and not gate_name else 1)
        of_values = layer.num_kv_heads * (layer.value_size or layer.head_dim)
        sizes = (of_queries, layer.kv_size, of_values)[: 2 + layer.has_values]
        if len(names.qkv) == 1 and layer.qkv_rows == "by key head":
            y = self._parts.linear(x, prefix + names.qkv[0], sum(sizes), hidden, layer.qkv_bias)
            q, k, v = _by_key_head(y, layer)
        else:
            q, k, *values = self._parts.linears(x, prefix, names.qkv[: len(sizes)], sizes, layer.qkv_bias, width)
            v = values[0] if values else k
        if gate_name:
            gate = self._parts.linear(x, prefix + gate_name, layer.q_size, hidden, False)
        elif layer.gated:
            q, gate = _by_head(q, layer)
        q = self._rotate(q, layer, layer.num_heads, prefix + names.q_norm)
        if layer.growth is not None:
            q = self._grown(q, layer.growth)
        if layer.norms_values:
            v = rms(ops.reshape(v, i64([0, layer.num_kv_heads, layer.head_dim]), True), self._spec.norm_eps)
            v = ops.reshape(v, i64([0, layer.kv_size]), True)
        k = self._rotate(k, layer, layer.num_kv_heads, prefix + names.k_norm)
        v = scaled(_padded(v, layer.num_kv_heads, layer), layer.value_scale)
        y = self._paged_attention((q, k, limited(v, layer.limit)), n, prefix)
        if layer.gated:
            y = ops.multiply(y, ops.sigmoid(gate))
        if layer.gates_heads:
            gates = self._parts.linear(x, prefix + names.head_gate, layer.num_heads, hidden, False)
            y = _gated_heads(y, ops.sigmoid(gates), layer)
        return self._parts.linear(_cut(y, layer), prefix + names.o, hidden, layer.result_size, layer.o_bias)

    def _latent_attention(self, x: Node, n: int, prefix: str, latent: Latent) -> Node:
        layer, hidden = self._spec.attention[n], self._spec.hidden_size
        heads, d = layer.num_heads, layer.head_dim
        q = ops.reshape(self._latent_queries(x, prefix, layer, latent), i64([0, heads, 1, d]), True)
        name, sizes = prefix + "kv_a_proj_with_mqa", (latent.rank, latent.rotated)
        compressed, shared = parts(self._parts.linear(x, name, sum(sizes), hidden, layer.qkv_bias), sizes, 1)
        compressed = self._latent_norm(compressed, prefix + "kv_a_layernorm", latent.rank, latent)
        plain = d - latent.rotated
        both = self._parts.linear(
            compressed, prefix + "kv_b_proj", heads * (plain + latent.value_size), latent.rank, False
        )
        both = ops.reshape(both, i64([0, heads, 1, plain + latent.value_size]), True)
        turning = replace(layer, head_dim=latent.rotated)
        assert layer.rope is not None
        shared = self._turned(ops.reshape(shared, i64([0, 1, 1, latent.rotated]), True), turning, layer.rope, 1)
        k = ops.concat([part(both, 0, plain), ops.tile(shared, i64([1, heads, 1, 1]))], -1)
        q = ops.concat([part(q, 0, plain), self._turned(part(q, plain, d), turning, layer.rope, heads)], -1)
        q = q if layer.growth is None else self._grown(q, layer.growth)
        missing = i64([0, 0, 0, d - latent.value_size])
        v = ops.pad(part(both, plain, plain + latent.value_size), i64([0, 0, 0, 0]), missing, "constant", f32(0.0))
        whole = [ops.reshape(one, i64([0, heads * d]), True) for one in (q, k, v)]
        y = ops.reshape(self._paged_attention((whole[0], whole[1], whole[2]), n, prefix), i64([0, heads, 1, d]), True)
        inner = heads * latent.value_size
        y = ops.reshape(part(y, 0, latent.value_size), i64([0, inner]), True)
        return self._parts.linear(y, prefix + self._spec.names.o, hidden, inner, layer.o_bias)

    def _latent_queries(self, x: Node, prefix: str, layer: Attention, latent: Latent) -> Node:
        """[T, heads * head_dim], not yet rotated."""
        hidden, rank = self._spec.hidden_size, latent.query_rank
        if not rank:
            return self._parts.linear(x, prefix + "q_proj", layer.q_size, hidden, False)
        compressed = self._parts.linear(x, prefix + "q_a_proj", rank, hidden, layer.qkv_bias)
        compressed = self._latent_norm(compressed, prefix + "q_a_layernorm", rank, latent)
        return self._parts.linear(compressed, prefix + "q_b_proj", layer.q_size, rank, False)

    def _latent_norm(self, x: Node, name: str, size: int, latent: Latent) -> Node:
        return ops.multiply(rms(x, latent.norm_eps), self._weights.vector(name + ".weight", size))

    def _paged_attention(self, qkv: tuple[Node, Node, Node], n: int, prefix: str) -> Node:
        layer, (_, k, v) = self._spec.attention[n], qkv
        caches = [self._add_input(f"{kind}_cache.{n}", ov.Type.dynamic, [-1] * 4) for kind in ("key", "value")]
        self._caches[n] = caches, k, v
        sinks = None
        if layer.sinks:
            values = self._weights.vector(prefix + self._spec.names.sinks, layer.num_heads)
            sinks = ops.reshape(values, i64([1, layer.num_heads, 1, 1]), False)
        return paged_attention(qkv, caches, self._tables_of(n), layer, sinks, self._token_kinds(n))

    def _shared_attention(self, q: Node, n: int, source: int) -> Node:
        """The operation writes what it attends to: the same keys and values once more, in the same places."""
        caches, k, v = self._caches[source]
        return paged_attention(
            (q, k, v), caches, self._tables_of(source), self._spec.attention[n], None, self._token_kinds(n)
        )

    def _tables_of(self, n: int) -> dict[str, Node]:
        """Inputs of attention in this layer's group. `LayerGroup.per_slot` layers share a block: the parts of block b
        are blocks b * per_slot and those after it."""
        number = self._group_of[n]
        group, suffix = self._groups[number], group_suffix(number, len(self._groups))
        inputs = {name: self._inputs[name + suffix] for name in GROUP_INPUTS}
        inputs["subsequence_begins"] = self._inputs["subsequence_begins"]
        if group.per_slot > 1:
            key = number, group.place(n)
            if key not in self._blocks:
                first = ops.multiply(inputs["block_indices"], i32(group.per_slot))
                self._blocks[key] = ops.add(first, i32(group.place(n)))
            inputs["block_indices"] = self._blocks[key]
        return inputs

    def _grown(self, q: Node, growth: QueryGrowth) -> Node:
        """Queries [T, ...], by their positions."""
        place = ops.add(self._inputs["position_ids"], i64(growth.first))  # in integers: bf16 has none above 256
        steps = ops.convert(ops.divide(place, i64(growth.every)), "f32")
        factor = ops.add(ops.multiply(ops.log(ops.add(steps, f32(1.0))), f32(growth.scale)), f32(1.0))
        further = len(q.get_output_partial_shape(0)) - 1
        return ops.multiply(q, ops.unsqueeze(factor, i64(range(1, 1 + further))))

    def _rotations(self, rope: Rope) -> tuple[Node, Node]:
        """cos and sin of every token's angles, [T, 1, 1, head_dim]: the two halves of a head turn together."""
        positions, by_position = self._turning(rope)
        half = ops.matmul(f32(by_position[None]), ops.convert(positions, "f32"), False, False)
        angles = ops.transpose(half, i64([0, 2, 1]))
        angles = ops.concat([angles, angles], -1)
        cos, sin = ops.cos(angles), ops.sin(angles)
        if rope.attention_factor != 1.0:
            factor = f32(rope.attention_factor)
            cos, sin = ops.multiply(cos, factor), ops.multiply(sin, factor)
        return ops.unsqueeze(cos, i64(1)), ops.unsqueeze(sin, i64(1))

    def _rotate(self, x: Node, layer: Attention, heads: int, norm: str) -> Node:
        """[T, heads * head_dim] rotated, behind a norm where the family has one."""
        d, rope = layer.head_dim, layer.rope
        if layer.qk_norm == "all heads":
            x = self._parts.norm(x, norm, heads * d)
        x = ops.reshape(limited(x, layer.limit), i64([0, heads, 1, d]), True)
        if layer.qk_norm == "each head":
            x = self._parts.norm(x, norm, d)
        elif layer.qk_norm == "each head, own weights":
            x = self._normed_heads(x, norm, heads, d)
        elif layer.qk_norm == "each head, weightless" and rope is not None:
            x = rms(x, self._spec.norm_eps)
        x = x if rope is None else self._turned(x, layer, rope, heads)
        if layer.qk_norm == "each head, rotated":
            x = self._parts.norm(x, norm, d)
        return ops.reshape(x, i64([0, heads * d]), True)

    def _turned(self, x: Node, layer: Attention, rope: Rope, heads: int) -> Node:
        """[T, heads, 1, head_dim], whose first values are rotated, or all of them."""
        d, half = layer.head_dim, len(rope.inv_freq)
        whole = x if 2 * half == d else part(x, 0, 2 * half)
        if layer.alternating_pairs:  # queries and keys may be in any order, as long as it is the same
            whole = ops.transpose(ops.reshape(whole, i64([0, heads, half, 2]), True), i64([0, 1, 3, 2]))
            whole = ops.reshape(whole, i64([0, heads, 1, 2 * half]), True)
        first, second = part(whole, 0, half), part(whole, half, 2 * half)
        turned = ops.concat([ops.multiply(second, f32(-1.0)), first], -1)
        if rope not in self._turns:
            self._turns[rope] = self._rotations(rope)
        cos, sin = self._turns[rope]
        whole = ops.add(ops.multiply(whole, cos), ops.multiply(turned, sin))
        return whole if 2 * half == d else ops.concat([whole, part(x, 2 * half, d)], -1)

    def _normed_heads(self, x: Node, name: str, heads: int, size: int) -> Node:
        """[T, heads, 1, size], with weights for each head."""
        weights = self._weights.table(name + ".weight", (heads, size))
        return ops.multiply(self._parts.normed(x), ops.reshape(weights, i64([1, heads, 1, size]), False))


def _padded(v: Node, heads: int, layer: Attention) -> Node:
    """Values [T, heads * value_size], with zeros behind each."""
    if not layer.value_size:
        return v
    v = ops.reshape(v, i64([0, heads, layer.value_size]), True)
    missing = i64([0, 0, layer.head_dim - layer.value_size])
    v = ops.pad(v, i64([0, 0, 0]), missing, "constant", f32(0.0))
    return ops.reshape(v, i64([0, heads * layer.head_dim]), True)


def _cut(y: Node, layer: Attention) -> Node:
    """Results [T, heads * head_dim], without what is behind each value."""
    if not layer.value_size:
        return y
    y = ops.reshape(y, i64([0, layer.num_heads, 1, layer.head_dim]), True)
    return ops.reshape(part(y, 0, layer.value_size), i64([0, layer.result_size]), True)


def _by_head(y: Node, layer: Attention) -> list[Node]:
    """Queries and gates [T, heads * head_dim] out of rows that have each head's one after the other."""
    both = ops.reshape(y, i64([0, layer.num_heads, 2 * layer.head_dim]), True)
    return [ops.reshape(x, i64([0, layer.q_size]), True) for x in parts(both, (layer.head_dim,) * 2, 2)]


def _gated_heads(y: Node, gates: Node, layer: Attention) -> Node:
    """y [T, heads * head_dim] with each head times its gate, [T, heads]."""
    heads = ops.reshape(y, i64([0, layer.num_heads, layer.head_dim]), True)
    return ops.reshape(ops.multiply(heads, ops.unsqueeze(gates, i64(2))), i64([0, layer.q_size]), True)


def _by_key_head(y: Node, layer: Attention) -> list[Node]:
    """Queries, keys and values out of rows that are ordered by key head."""
    heads = (layer.num_heads // layer.num_kv_heads, 1, 1)
    y = ops.reshape(y, i64([0, layer.num_kv_heads, sum(heads), layer.head_dim]), True)
    return [
        ops.reshape(rows, i64([0, layer.num_kv_heads * count * layer.head_dim]), True)
        for rows, count in zip(parts(y, heads, 2), heads, strict=True)
    ]
