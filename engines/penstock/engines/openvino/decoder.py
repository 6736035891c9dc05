"""The decoder's graph around paged attention. `decoder_inputs` says what goes in and comes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.layer_groups import group_layers
from penstock.engines.openvino.decoder_inputs import GROUP_INPUTS, group_suffix, step_inputs
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.rope import Rope
from penstock.engines.openvino.weights import Node, Weights, round_to


def build_decoder(spec: DecoderSpec, weights: Weights, precision: str) -> ov.Model:
    """`precision` of the computation: bf16, f16 or f32. Raises UnsupportedError when the checkpoint holds tensors that
    this graph would ignore."""
    model = _Builder(spec, weights, precision).build()
    ignored = [n for n in weights.unused() if not n.endswith("rotary_emb.inv_freq")]
    if spec.tie_word_embeddings:
        ignored = [n for n in ignored if n != "lm_head.weight"]
    if ignored:
        raise UnsupportedError(
            f"the checkpoint has {len(ignored)} tensors that no part of the model uses: {ignored[0]} ..."
        )
    return model


class _Builder:
    def __init__(self, spec: DecoderSpec, weights: Weights, precision: str) -> None:
        self._spec = spec
        self._precision = precision
        self._weights = weights
        self._inputs: dict[str, Node] = {}
        self._turns: dict[Rope, tuple[Node, Node]] = {}
        groups = group_layers(spec.sliding_windows)
        self._num_groups = len(groups)
        self._group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}

    def build(self) -> ov.Model:
        spec = self._spec
        for name, (dtype, shape) in step_inputs(self._num_groups).items():
            self._add_input(name, dtype, shape)
        self._turns = {rope: self._rotations(rope) for rope in dict.fromkeys(spec.ropes) if rope is not None}
        embedding = "model.embed_tokens.weight"
        x = self._weights.look_up(self._inputs["input_ids"], embedding, (spec.vocab_size, spec.hidden_size))
        if spec.embedding_scale != 1.0:
            # Models were trained with the factor in their own precision: 55.5 in place of 55.43.
            x = ops.multiply(x, _f32(round_to(np.float32(spec.embedding_scale), self._precision)))
        for n in range(spec.num_layers):
            x = self._layer(x, n)
        # Logits only where they are asked for: the head is the largest matrix of a small model.
        x = ops.gather(x, self._inputs["sampled_tokens_indices"], _i64(0))
        x = self._rms_norm(x, "model.norm.weight", spec.hidden_size)
        head = embedding if spec.tie_word_embeddings else "lm_head.weight"
        logits = _scaled(
            self._weights.project(x, head, (spec.vocab_size, spec.hidden_size), is_head=True), spec.logits_scale
        )
        logits.output(0).set_names({"logits"})
        x.output(0).set_names({"hidden"})
        return ov.Model([ops.result(logits), ops.result(x)], list(self._inputs.values()), "decoder")

    def _add_input(self, name: str, dtype: object, shape: list[int]) -> Node:
        node = ops.parameter(ov.PartialShape(shape), dtype, name=name)
        node.output(0).set_names({name})
        self._inputs[name] = node
        return node

    def _layer(self, x: Node, n: int) -> Node:
        norms = self._spec.norms
        y = self._attention(self._layer_norm(x, n, norms.before_attention), n)
        x = ops.add(x, _scaled(self._layer_norm(y, n, norms.after_attention), self._spec.residual_scale))
        y = self._mlp(self._layer_norm(x, n, norms.before_mlp), n)
        return ops.add(x, _scaled(self._layer_norm(y, n, norms.after_mlp), self._spec.residual_scale))

    def _layer_norm(self, x: Node, n: int, name: str) -> Node:
        return self._rms_norm(x, f"model.layers.{n}.{name}.weight", self._spec.hidden_size) if name else x

    def _attention(self, x: Node, n: int) -> Node:
        spec, prefix = self._spec, f"model.layers.{n}.self_attn."
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        names, sizes = ("q_proj", "k_proj", "v_proj"), (q_size, kv_size, kv_size)
        q, k, v = self._linears(x, prefix, names, sizes, "qkv_proj", spec.qkv_bias)
        q = self._rotate(q, n, spec.num_heads, prefix + "q_norm.weight")
        k = self._rotate(k, n, spec.num_kv_heads, prefix + "k_norm.weight")
        return self._linear(self._paged_attention(q, k, v, n), prefix + "o_proj", spec.hidden_size, q_size, spec.o_bias)

    def _paged_attention(self, q: Node, k: Node, v: Node, n: int) -> Node:
        spec, suffix = self._spec, group_suffix(self._group_of[n], self._num_groups)
        caches = [self._add_input(f"{kind}_cache.{n}", ov.Type.dynamic, [-1] * 4) for kind in ("key", "value")]
        ints, floats = _i32([]), _f32([])
        operands = [q, k, v, *caches]
        inputs = {name: self._inputs[name + suffix] for name in GROUP_INPUTS}
        operands += [inputs["past_lens"], self._inputs["subsequence_begins"]]
        operands += [inputs["block_indices"], inputs["block_indices_begins"]]
        operands += [
            _f32(spec.query_scale),
            _i32(spec.sliding_windows[n]),
            floats,
            inputs["max_context_len"],
        ]
        # The op's optional parts, left empty: score aggregation, cache rotation, xattention, sinks, eviction ...
        operands += [
            ints,
            ints,
            ints,
            floats,
            floats,
            _i32(0),
            _i32(0),
            _f32(np.zeros((0, 0, 0, 0))),
            _i32(0),
        ]
        operands += [ints, ints, ints, ints, ops.constant(np.zeros(0, np.uint8)), ints]
        attention = PagedAttention([operand.output(0) for operand in operands])
        for kind in ("k", "v"):
            attention.get_rt_info()[f"num_{kind}_heads"] = spec.num_kv_heads
            attention.get_rt_info()[f"{kind}_head_size"] = spec.head_dim
        return attention.output(0)

    def _mlp(self, x: Node, n: int) -> Node:
        spec, prefix = self._spec, f"model.layers.{n}.mlp."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        gate, up = self._linears(x, prefix, ("gate_proj", "up_proj"), (inner, inner), "gate_up_proj", spec.mlp_bias)
        gate = ops.swish(gate) if spec.activation == "silu" else ops.gelu(gate, "tanh")
        return self._linear(ops.multiply(gate, up), prefix + "down_proj", hidden, inner, spec.mlp_bias)

    def _linears(
        self, x: Node, prefix: str, names: Sequence[str], sizes: Sequence[int], fused: str, bias: bool
    ) -> list[Node]:
        """Of the hidden state; in some families one matrix, `fused`, has all of their rows."""
        hidden = self._spec.hidden_size
        if not self._spec.fused:
            return [self._linear(x, prefix + name, size, hidden, bias) for name, size in zip(names, sizes, strict=True)]
        y = self._linear(x, prefix + fused, sum(sizes), hidden, bias)
        ends = list(accumulate(sizes, initial=0))
        one = _i64([1])
        return [ops.slice(y, _i64([begin]), _i64([end]), one, one) for begin, end in pairwise(ends)]

    def _linear(self, x: Node, name: str, out: int, inner: int, bias: bool) -> Node:
        y = self._weights.project(x, name + ".weight", (out, inner))
        return ops.add(y, self._weights.vector(name + ".bias", out)) if bias else y

    def _rms_norm(self, x: Node, name: str, size: int) -> Node:
        variance = ops.reduce_mean(ops.power(x, _f32(2.0)), _i64([-1]), True)
        scale = ops.divide(_f32(1.0), ops.sqrt(ops.add(variance, _f32(self._spec.rms_norm_eps))))
        return ops.multiply(ops.multiply(x, scale), self._weights.vector(name, size, plus=self._spec.norm_offset))

    def _rotations(self, rope: Rope) -> tuple[Node, Node]:
        """cos and sin of every token's angles, [T, 1, 1, head_dim]: the two halves of a head turn together."""
        positions = ops.unsqueeze(ops.convert(self._inputs["position_ids"], "f32"), _i64([1, 2]))
        half = ops.matmul(_f32(rope.inv_freq[None, :, None]), positions, False, False)
        angles = ops.transpose(half, _i64([0, 2, 1]))
        angles = ops.concat([angles, angles], -1)
        cos, sin = ops.cos(angles), ops.sin(angles)
        if rope.attention_factor != 1.0:
            factor = _f32(rope.attention_factor)
            cos, sin = ops.multiply(cos, factor), ops.multiply(sin, factor)
        return ops.unsqueeze(cos, _i64(1)), ops.unsqueeze(sin, _i64(1))

    def _rotate(self, x: Node, n: int, heads: int, norm: str) -> Node:
        """[T, heads * head_dim] rotated, behind a norm where the family has one."""
        d, rope = self._spec.head_dim, self._spec.ropes[n]
        if self._spec.qk_norm == "all heads":
            x = self._rms_norm(x, norm, heads * d)
        x = ops.reshape(x, _i64([0, heads, 1, d]), True)
        if self._spec.qk_norm == "each head":
            x = self._rms_norm(x, norm, d)
        if rope is None:
            return ops.reshape(x, _i64([0, heads * d]), True)
        half = len(rope.inv_freq)
        first, second = _part(x, 0, half), _part(x, half, 2 * half)
        turned = ops.concat([ops.multiply(second, _f32(-1.0)), first], -1)
        cos, sin = self._turns[rope]
        whole = x if 2 * half == d else _part(x, 0, 2 * half)
        whole = ops.add(ops.multiply(whole, cos), ops.multiply(turned, sin))
        x = whole if 2 * half == d else ops.concat([whole, _part(x, 2 * half, d)], -1)
        return ops.reshape(x, _i64([0, heads * d]), True)


def _part(x: Node, begin: int, end: int) -> Node:
    """Of the last axis of four."""
    return ops.slice(x, _i64([begin]), _i64([end]), _i64([1]), _i64([3]))


def _scaled(x: Node, factor: float) -> Node:
    return x if factor == 1.0 else ops.multiply(x, _f32(factor))


def _f32(value: object) -> Node:
    return ops.constant(np.asarray(value, np.float32))


def _i32(value: object) -> Node:
    return ops.constant(np.asarray(value, np.int32))


def _i64(value: object) -> Node:
    return ops.constant(np.asarray(value, np.int64))
