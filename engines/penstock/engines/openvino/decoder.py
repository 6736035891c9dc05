"""The decoder's graph around paged attention. `decoder_inputs` says what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.attention import paged_attention
from penstock.engines.openvino.decoder_inputs import (
    FEATURES,
    GROUP_INPUTS,
    group_suffix,
    step_inputs,
)
from penstock.engines.openvino.decoder_spec import (
    MLP,
    Attention,
    Clamp,
    DecoderSpec,
    Experts,
    Latent,
    LayerEmbeddings,
    QueryGrowth,
)
from penstock.engines.openvino.delta_prompts import PROMPT_INPUTS
from penstock.engines.openvino.expert_mix import alternating, clamped, mix
from penstock.engines.openvino.graph_nodes import (
    ACTIVATIONS,
    Node,
    capped,
    f32,
    i32,
    i64,
    limited,
    part,
    parts,
    rms,
    scaled,
    sparse,
    xielu,
)
from penstock.engines.openvino.lora import LOGITS_AT, LoraGraph
from penstock.engines.openvino.recurrent import DELTA_INPUTS, STATE_INPUTS
from penstock.engines.openvino.recurrent_layers import RecurrentLayers
from penstock.engines.openvino.rope import Frequencies, Rope
from penstock.engines.openvino.weights import Weights, round_to


@dataclass(frozen=True)
class FeatureTap:
    """What a draft head is given of every token: hidden states of some layers, made into one vector."""

    layers: tuple[int, ...]
    """The hidden states behind so many layers are joined; 0: the embeddings."""
    width: int
    """Of the vector."""
    combine: Callable[[Node], Node] = lambda joined: joined
    """[T, joined hidden states] to [T, width]."""
    identity: str = ""
    """Of what `combine` computes."""
    behind_norm: bool = False
    """What is joined goes through the model's final norm first."""


def check_all_used(spec: DecoderSpec, weights: Weights) -> None:
    """Raises UnsupportedError when the checkpoint holds tensors that no graph has."""
    layers, attention = spec.names.layers, spec.names.attention
    spare = [f"{layers}.{spec.num_layers + n}." for n in range(spec.further_layers)]
    sharing = [n for n, layer in spec.attention.items() if layer.shares is not None]
    spare += [f"{layers}.{n}.{attention}.{part}" for n in sharing for part in ("k_", "v_")]
    ignored = [n for n in weights.unused() if not n.endswith("rotary_emb.inv_freq") and not n.startswith(tuple(spare))]
    if spec.tie_word_embeddings:
        ignored = [n for n in ignored if n != spec.names.head + ".weight"]
    if ignored:
        raise UnsupportedError(
            f"the checkpoint has {len(ignored)} tensors that no part of the model uses: {ignored[0]} ..."
        )


class DecoderBuilder:
    """Makes the graph of a decoder; that of a draft head has the same parts."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        precision: str,
        lora: bool = False,
        tap: FeatureTap | None = None,
    ) -> None:
        self._spec = spec
        self._precision = precision
        self._weights = weights
        self._inputs: dict[str, Node] = {}
        self._turns: dict[Rope, tuple[Node, Node]] = {}
        self._groups = spec.groups
        self._num_groups = len(self._groups)
        self._group_of = {layer: number for number, group in enumerate(self._groups) for layer in group.layers}
        self._blocks: dict[tuple[int, int], Node] = {}
        """By group and place: where a layer that is one of several in a slot has its blocks."""
        self._caches: dict[int, tuple[list[Node], Node, Node]] = {}
        """By layer: its caches, and the keys and values of this step's tokens."""
        self._of_layers: list[Node] = []
        """An embedding of each token for each layer (`LayerEmbeddings`)."""
        self.lora = LoraGraph(precision, self._add_input) if lora else None
        self._tap = tap
        self._recurrent = RecurrentLayers(spec, weights, precision, self._inputs, self._add_input, self._linear)

    def build(self) -> ov.Model:
        spec = self._spec
        self._begin()
        x = self._first_state(self._embed())
        states = [x]
        for n in range(spec.num_layers):
            x = self._layer(x, n)
            states.append(x)
        x = self._norm(self._chosen(x), spec.names.norm, spec.hidden_size)
        logits = scaled(self._head(x), spec.logits_scale)
        results = self._results(capped(logits, spec.logits_cap), x)
        if self.lora:
            added = self.lora.logits(x, self._inputs["sampled_tokens_indices"], spec.vocab_size, spec.hidden_size)
            results.append(ops.result(self._added(logits, scaled(added, spec.logits_scale))))
        if self._tap:
            joined = [states[n] for n in self._tap.layers]
            features = ops.concat(joined, 1) if len(joined) > 1 else joined[0]
            if self._tap.behind_norm:
                features = self._norm(features, spec.names.norm, spec.hidden_size)
            results.append(ops.result(self._tap.combine(features)))
            results[-1].output(0).set_names({FEATURES})
        return self._model(results)

    def _added(self, logits: Node, added: Node) -> Node:
        """What adapters add to the logits that the model gives, in the rows that they change."""
        cap = self._spec.logits_cap
        if not cap:
            return added
        before = ops.gather(logits, self._inputs[LOGITS_AT], i64(0))
        return ops.subtract(capped(ops.add(before, added), cap), capped(before, cap))

    def _begin(self) -> None:
        """Makes what all layers need."""
        for name, (dtype, shape) in step_inputs(self._num_groups).items():
            self._add_input(name, dtype, shape)
        if self._spec.is_hybrid:
            inputs = STATE_INPUTS | (DELTA_INPUTS | PROMPT_INPUTS if self._spec.has_delta_nets else {})
            for name, (dtype, shape) in inputs.items():
                self._add_input(name, dtype, shape)
        self._turns = {rope: self._rotations(rope) for rope in dict.fromkeys(self._spec.ropes) if rope is not None}

    def _chosen(self, x: Node) -> Node:
        """Logits only where they are needed: the head is the largest matrix of a small model."""
        return ops.gather(x, self._inputs["sampled_tokens_indices"], i64(0))

    def _results(self, logits: Node, hidden: Node) -> list[Node]:
        logits.output(0).set_names({"logits"})
        hidden.output(0).set_names({"hidden"})
        return [ops.result(logits), ops.result(hidden)]

    def _model(self, results: list[Node]) -> ov.Model:
        return ov.Model([*results, *self._recurrent.kept], list(self._inputs.values()), "decoder")

    def _add_input(self, name: str, dtype: object, shape: list[int]) -> Node:
        node = ops.parameter(ov.PartialShape(shape), dtype, name=name)
        node.output(0).set_names({name})
        self._inputs[name] = node
        return node

    def _embed(self) -> Node:
        spec, names = self._spec, self._spec.names
        x = self._weights.look_up(
            self._inputs["input_ids"], names.embedding + ".weight", (spec.vocab_size, spec.hidden_size)
        )
        if spec.embedding_scale != 1.0:
            # Models were trained with the factor in their own precision: 55.5 in place of 55.43.
            x = ops.multiply(x, f32(round_to(np.float32(spec.embedding_scale), self._precision)))
        if names.positions:
            shape = (spec.position_offset + spec.max_position_embeddings, spec.hidden_size)
            places = self._inputs["position_ids"]
            if spec.position_offset:
                places = ops.add(places, i64(spec.position_offset))
            x = ops.add(x, self._weights.look_up(places, names.positions + ".weight", shape))
        return self._norm(x, names.embedding_norm, spec.hidden_size)

    def _first_state(self, x: Node) -> Node:
        """What the first layer gets; x: the embeddings of the tokens."""
        if self._spec.embeddings_of_layers is not None:
            self._of_layers = self._embed_for_layers(x, self._spec.embeddings_of_layers)
        return x

    def _embed_for_layers(self, x: Node, own: LayerEmbeddings) -> list[Node]:
        """[T, size] for each layer. Tokens that the table does not have get its first row."""
        layers, hidden, prefix = self._spec.num_layers, self._spec.hidden_size, "model."
        width = layers * own.size
        table = prefix + "embed_tokens_per_layer.weight"
        looked_up = self._weights.look_up(self._ids_for_layers(own), table, (own.vocab_size, width))
        looked_up = ops.multiply(looked_up, f32(round_to(np.float32(own.size**0.5), self._precision)))
        y = scaled(self._linear(x, prefix + "per_layer_model_projection", width, hidden, False), hidden**-0.5)
        y = self._norm(ops.reshape(y, i64([0, layers, own.size]), True), prefix + "per_layer_projection_norm", own.size)
        both = ops.add(ops.reshape(y, i64([0, width]), True), looked_up)
        return parts(scaled(both, 2**-0.5), (own.size,) * layers, 1)

    def _ids_for_layers(self, own: LayerEmbeddings) -> Node:
        ids = self._inputs["input_ids"]
        if own.vocab_size < self._spec.vocab_size:
            ids = ops.select(ops.less(ids, i64(own.vocab_size)), ids, i64(0))
        return ids

    def _head(self, x: Node) -> Node:
        spec, names = self._spec, self._spec.names
        name = (names.embedding if spec.tie_word_embeddings else names.head) + ".weight"
        logits = self._weights.project(x, name, (spec.vocab_size, spec.hidden_size), is_head=True)
        return (
            ops.add(logits, self._weights.vector(names.head + ".bias", spec.vocab_size)) if spec.head_bias else logits
        )

    def _layer(self, x: Node, n: int) -> Node:
        layer, scale = self._spec.layers[n], self._spec.residual_scale
        norms = layer.norms
        if layer.parallel:
            normed = self._layer_norm(x, n, norms.before_attention)
            y = self._mixer(normed, n)
            if norms.before_mlp != norms.before_attention:
                normed = self._layer_norm(x, n, norms.before_mlp)
            return ops.add(x, ops.add(y, self._mlp(normed, n)))
        if layer.mixer is not None:
            y = self._mixer(self._layer_norm(x, n, norms.before_attention), n)
            x = ops.add(x, scaled(self._layer_norm(y, n, norms.after_attention), scale))
        if layer.mlp is None:
            return x
        y = self._mlp(self._layer_norm(x, n, norms.before_mlp), n)
        if layer.beside is not None:
            y = ops.add(self._layer_norm(y, n, norms.beside[0]), self._beside(x, n, layer.beside))
        x = ops.add(x, scaled(self._layer_norm(y, n, norms.after_mlp), scale))
        if self._spec.embeddings_of_layers is not None:
            x = ops.add(x, self._own_embedding(x, n, self._spec.embeddings_of_layers))
        name = f"{self._spec.names.layers}.{n}.layer_scalar"
        return ops.multiply(x, self._weights.vector(name, 1)) if layer.scaled else x

    def _beside(self, x: Node, n: int, mixture: Experts) -> Node:
        """What experts beside the MLP add; x: what is in front of its norm."""
        _, before, after = self._spec.layers[n].norms.beside
        prefix = f"{self._spec.names.layers}.{n}."
        y = self._experts(self._layer_norm(x, n, before), prefix, mixture, x)
        return self._layer_norm(y, n, after)

    def _own_embedding(self, x: Node, n: int, own: LayerEmbeddings) -> Node:
        prefix, hidden = f"{self._spec.names.layers}.{n}.", self._spec.hidden_size
        gate = ACTIVATIONS[own.activation](self._linear(x, prefix + "per_layer_input_gate", own.size, hidden, False))
        y = ops.multiply(gate, self._of_layers[n])
        y = self._linear(y, prefix + "per_layer_projection", hidden, own.size, False)
        return self._layer_norm(y, n, "post_per_layer_input_norm")

    def _layer_norm(self, x: Node, n: int, name: str) -> Node:
        return self._norm(x, name and f"{self._spec.names.layers}.{n}.{name}", self._spec.hidden_size)

    def _mixer(self, x: Node, n: int) -> Node:
        layer = self._spec.layers[n]
        assert layer.mixer is not None
        if not isinstance(layer.mixer, Attention):
            return self._recurrent.layer(x, n, layer.mixer)
        y = self._attention(scaled(x, layer.mixer.input_scale), n)
        y = scaled(y, layer.mixer.output_scale)
        return y if layer.with_states is None else ops.add(y, self._recurrent.layer(x, n, layer.with_states))

    def _attention(self, x: Node, n: int, width: int = 0) -> Node:
        """`width` of x; 0: that of the hidden state."""
        names, hidden, layer = self._spec.names, self._spec.hidden_size, self._spec.attention[n]
        prefix = f"{names.layers}.{n}.{names.attention}."
        if layer.latent is not None:
            return self._latent_attention(x, n, prefix, layer.latent)
        if layer.shares is not None:
            q = self._linear(x, prefix + names.qkv[0], layer.q_size, hidden, layer.qkv_bias)
            q = self._rotate(q, layer, layer.num_heads, prefix + names.q_norm)
            y = self._shared_attention(q, n, layer.shares)
            return self._linear(y, prefix + names.o, hidden, layer.q_size, layer.o_bias)
        gate_name = names.attention_gate
        of_queries = layer.q_size * (2 if layer.gated and not gate_name else 1)
        of_values = layer.num_kv_heads * (layer.value_size or layer.head_dim)
        sizes = (of_queries, layer.kv_size, of_values)[: 2 + layer.has_values]
        if len(names.qkv) == 1 and layer.qkv_rows == "by key head":
            y = self._linear(x, prefix + names.qkv[0], sum(sizes), hidden, layer.qkv_bias)
            q, k, v = _by_key_head(y, layer)
        else:
            q, k, *values = self._linears(x, prefix, names.qkv[: len(sizes)], sizes, layer.qkv_bias, width)
            v = values[0] if values else k
        if gate_name:
            gate = self._linear(x, prefix + gate_name, layer.q_size, hidden, False)
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
            gates = self._linear(x, prefix + names.head_gate, layer.num_heads, hidden, False)
            y = _gated_heads(y, ops.sigmoid(gates), layer)
        return self._linear(_cut(y, layer), prefix + names.o, hidden, layer.result_size, layer.o_bias)

    def _latent_attention(self, x: Node, n: int, prefix: str, latent: Latent) -> Node:
        layer, hidden = self._spec.attention[n], self._spec.hidden_size
        heads, d = layer.num_heads, layer.head_dim
        q = ops.reshape(self._latent_queries(x, prefix, layer, latent), i64([0, heads, 1, d]), True)
        name, sizes = prefix + "kv_a_proj_with_mqa", (latent.rank, latent.rotated)
        compressed, shared = parts(self._linear(x, name, sum(sizes), hidden, layer.qkv_bias), sizes, 1)
        compressed = self._latent_norm(compressed, prefix + "kv_a_layernorm", latent.rank, latent)
        plain = d - latent.rotated
        both = self._linear(compressed, prefix + "kv_b_proj", heads * (plain + latent.value_size), latent.rank, False)
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
        return self._linear(y, prefix + self._spec.names.o, hidden, inner, layer.o_bias)

    def _latent_queries(self, x: Node, prefix: str, layer: Attention, latent: Latent) -> Node:
        """[T, heads * head_dim], not yet rotated."""
        hidden, rank = self._spec.hidden_size, latent.query_rank
        if not rank:
            return self._linear(x, prefix + "q_proj", layer.q_size, hidden, False)
        compressed = self._linear(x, prefix + "q_a_proj", rank, hidden, layer.qkv_bias)
        compressed = self._latent_norm(compressed, prefix + "q_a_layernorm", rank, latent)
        return self._linear(compressed, prefix + "q_b_proj", layer.q_size, rank, False)

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

    def _token_kinds(self, n: int) -> Node | None:
        """Of layer n, as `paged_attention` has them."""
        return None

    def _tables_of(self, n: int) -> dict[str, Node]:
        """Inputs of attention in this layer's group. `LayerGroup.per_slot` layers share a block: the parts of block b
        are blocks b * per_slot and those after it."""
        number = self._group_of[n]
        group, suffix = self._groups[number], group_suffix(number, self._num_groups)
        inputs = {name: self._inputs[name + suffix] for name in GROUP_INPUTS}
        inputs["subsequence_begins"] = self._inputs["subsequence_begins"]
        if group.per_slot > 1:
            key = number, group.place(n)
            if key not in self._blocks:
                first = ops.multiply(inputs["block_indices"], i32(group.per_slot))
                self._blocks[key] = ops.add(first, i32(group.place(n)))
            inputs["block_indices"] = self._blocks[key]
        return inputs

    def _mlp(self, x: Node, n: int) -> Node:
        names, mlp = self._spec.names, self._spec.layers[n].mlp
        assert mlp is not None
        prefix = f"{names.layers}.{n}." + (names.mlp and f"{names.mlp}.")
        return self._one_mlp(x, prefix, mlp) if isinstance(mlp, MLP) else self._experts(x, prefix, mlp)

    def _one_mlp(
        self, x: Node, prefix: str, mlp: MLP, gate_up: tuple[str, ...] = (), down: str = "", width: int = 0
    ) -> Node:
        """Without `gate_up` and `down`: the names that all MLPs have. `width` of x; 0: that of the hidden state."""
        names, inner, transposed = self._spec.names, mlp.intermediate_size, mlp.transposed
        width = width or self._spec.hidden_size
        activate, sizes = self._activation(mlp, prefix), (inner,) * (1 + mlp.gated)
        matrices = gate_up or names.gate_up
        first, *second = self._linears(x, prefix, matrices, sizes, mlp.bias, width, transposed=transposed)
        first = scaled(first, mlp.gate_scale)
        first = sparse(first, mlp.sparsity) if mlp.sparsity else first
        y = ops.multiply(activate(first), second[0]) if second else activate(first)
        y = self._linear(y, prefix + (down or names.down), width, inner, mlp.bias, transposed)
        return scaled(y, mlp.output_scale)

    def _activation(self, mlp: MLP, prefix: str) -> Callable[[Node], Node]:
        if mlp.activation != "xielu":
            return ACTIVATIONS[mlp.activation]
        up, down = (self._weights.table(f"{prefix}act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n"))
        beta, least = (self._weights.table(f"{prefix}act_fn.{name}", ()) for name in ("beta", "eps"))
        return lambda x: xielu(x, up, down, beta, least)

    def _experts(self, x: Node, prefix: str, mixture: Experts, routed: Node | None = None) -> Node:
        """`routed`: what the router gets; None: x."""
        names, scales = self._spec.names, None
        routed = x if routed is None else routed
        if mixture.router_norm:
            scale = self._weights.vector(prefix + "router.scale", self._spec.hidden_size)
            routed = scaled(ops.multiply(rms(routed, self._spec.norm_eps), scale), self._spec.hidden_size**-0.5)
            scales = self._weights.vector(prefix + "router.per_expert_scale", mixture.count)

        fused = f"{prefix}{names.experts}.0.gate_up_proj.weight" in self._weights
        gate_up = ("gate_up_proj",) if fused else ()

        def expert(rows: Node, number: int) -> Node:
            own = f"{prefix}{names.experts}.{number}."
            if mixture.clamp is not None:
                return self._clamped_mlp(rows, own, mixture.expert, mixture.clamp)
            return self._one_mlp(rows, own, mixture.expert, gate_up, names.expert_down, mixture.latent_size)

        logits = self._route(routed, prefix + names.router, mixture.count, mixture.router_bias)
        correction = names.correction and self._weights.vector(prefix + names.correction, mixture.count)
        hidden, latent = self._spec.hidden_size, mixture.latent_size
        bias = mixture.shared is not None and mixture.shared.bias
        inside = self._linear(x, prefix + names.latent[0], latent, hidden, bias) if latent else x
        y = mix(inside, logits, mixture, expert, correction or None, scales)
        y = self._linear(y, prefix + names.latent[1], hidden, latent, bias) if latent else y
        if mixture.shared is None:
            return y
        shared = self._one_mlp(x, f"{prefix}{names.shared_expert}.", mixture.shared)
        if not mixture.gated_share:
            return ops.add(y, scaled(shared, mixture.shared_scale))
        share = ops.sigmoid(self._route(x, f"{prefix}{names.shared_expert}_gate", 1, False))
        return ops.add(y, ops.multiply(share, shared))

    def _clamped_mlp(self, x: Node, prefix: str, mlp: MLP, clamp: Clamp) -> Node:
        names, hidden, inner = self._spec.names, self._spec.hidden_size, mlp.intermediate_size
        out = 2 * inner // len(names.gate_up)
        matrices = [self._linear(x, prefix + name, out, hidden, mlp.bias, mlp.transposed) for name in names.gate_up]
        gate, up = matrices if len(matrices) > 1 else alternating(matrices[0])
        y = clamped(gate, up, clamp)
        return self._linear(y, prefix + names.down, hidden, inner, mlp.bias, mlp.transposed)

    def _route(self, x: Node, name: str, count: int, bias: bool) -> Node:
        """[T, count]; these weights stay as they are: rounding would choose other experts."""
        y = ops.matmul(x, self._weights.table(name + ".weight", (count, self._spec.hidden_size)), False, True)
        return ops.add(y, self._weights.vector(name + ".bias", count)) if bias else y

    def _linears(
        self,
        x: Node,
        prefix: str,
        names: Sequence[str],
        sizes: Sequence[int],
        bias: bool,
        width: int = 0,
        transposed: bool = False,
    ) -> list[Node]:
        """Of the hidden state, or of x of another `width`; in some families one matrix has all of their rows."""
        hidden = width or self._spec.hidden_size
        if len(names) == len(sizes):
            return [
                self._linear(x, prefix + name, size, hidden, bias, transposed)
                for name, size in zip(names, sizes, strict=True)
            ]
        return parts(self._linear(x, prefix + names[0], sum(sizes), hidden, bias, transposed), sizes, 1)

    def _linear(self, x: Node, name: str, out: int, inner: int, bias: bool, transposed: bool = False) -> Node:
        transposed = transposed or self._spec.transposed
        y = self._weights.project(x, name + ".weight", (out, inner), transposed=transposed)
        if bias:
            y = ops.add(y, self._weights.vector(name + ".bias", out))
        # An expert's rows are not in the order of the tokens, by which adapters are chosen.
        if self.lora is None or f".{self._spec.names.experts}." in name:
            return y
        return self.lora.add(y, x, name, out, inner)

    def _norm(self, x: Node, name: str, size: int) -> Node:
        """Without a name, x as it is."""
        spec = self._spec
        if not name:
            return x
        y = self._normed(x)
        if spec.norm.endswith("without weights"):
            return y
        y = ops.multiply(y, self._weights.vector(name + ".weight", size, plus=spec.norm_offset))
        return ops.add(y, self._weights.vector(name + ".bias", size)) if spec.norm == "layer" else y

    def _normed(self, x: Node) -> Node:
        if self._spec.norm.startswith("rms"):
            return rms(x, self._spec.norm_eps)
        return ops.mvn(x, i64([-1]), True, self._spec.norm_eps, "inside_sqrt")

    def _normed_heads(self, x: Node, name: str, heads: int, size: int) -> Node:
        """[T, heads, 1, size], with weights for each head."""
        weights = self._weights.table(name + ".weight", (heads, size))
        return ops.multiply(self._normed(x), ops.reshape(weights, i64([1, heads, 1, size]), False))

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

    def _turning(self, rope: Rope) -> tuple[Node, Frequencies]:
        """Positions [T, n, 1] i64, and by how much each of these turns each pair, [pairs, n]."""
        return ops.unsqueeze(self._inputs["position_ids"], i64([1, 2])), rope.inv_freq[:, None]

    def _rotate(self, x: Node, layer: Attention, heads: int, norm: str) -> Node:
        """[T, heads * head_dim] rotated, behind a norm where the family has one."""
        d, rope = layer.head_dim, layer.rope
        if layer.qk_norm == "all heads":
            x = self._norm(x, norm, heads * d)
        x = ops.reshape(limited(x, layer.limit), i64([0, heads, 1, d]), True)
        if layer.qk_norm == "each head":
            x = self._norm(x, norm, d)
        elif layer.qk_norm == "each head, own weights":
            x = self._normed_heads(x, norm, heads, d)
        elif layer.qk_norm == "each head, weightless" and rope is not None:
            x = rms(x, self._spec.norm_eps)
        x = x if rope is None else self._turned(x, layer, rope, heads)
        if layer.qk_norm == "each head, rotated":
            x = self._norm(x, norm, d)
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
        cos, sin = self._turns[rope]
        whole = ops.add(ops.multiply(whole, cos), ops.multiply(turned, sin))
        return whole if 2 * half == d else ops.concat([whole, part(x, 2 * half, d)], -1)


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
