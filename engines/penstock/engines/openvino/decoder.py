"""The decoder's graph around its layers: `attention_layers`, `recurrent_layers`, `decoder_parts`. `decoder_inputs` says
what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.attention_layers import AttentionLayers
from penstock.engines.openvino.decoder_inputs import FEATURES, step_inputs
from penstock.engines.openvino.decoder_parts import DecoderParts
from penstock.engines.openvino.decoder_spec import Attention, DecoderSpec, Experts, LayerEmbeddings
from penstock.engines.openvino.delta_prompts import PROMPT_INPUTS
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, capped, f32, i64, parts, scaled
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
        self._of_layers: list[Node] = []
        """An embedding of each token for each layer (`LayerEmbeddings`)."""
        self.lora = LoraGraph(precision, self._add_input) if lora else None
        self._tap = tap
        self._parts = DecoderParts(spec, weights, self.lora)
        graph = (self._inputs, self._add_input)
        self._attention = AttentionLayers(spec, weights, *graph, self._parts, self._turning, self._token_kinds)
        self._recurrent = RecurrentLayers(spec, weights, precision, *graph, self._parts.linear)

    def build(self) -> ov.Model:
        spec = self._spec
        self._begin()
        x = self._first_state(self._embed())
        states = [x]
        for n in range(spec.num_layers):
            x = self._layer(x, n)
            states.append(x)
        x = self._parts.norm(self._chosen(x), spec.names.norm, spec.hidden_size)
        logits = scaled(self._head(x), spec.logits_scale)
        results = self._results(capped(logits, spec.logits_cap), x)
        if self.lora:
            added = self.lora.logits(x, self._inputs["sampled_tokens_indices"], spec.vocab_size, spec.hidden_size)
            results.append(ops.result(self._added(logits, scaled(added, spec.logits_scale))))
        if self._tap:
            joined = [states[n] for n in self._tap.layers]
            features = ops.concat(joined, 1) if len(joined) > 1 else joined[0]
            if self._tap.behind_norm:
                features = self._parts.norm(features, spec.names.norm, spec.hidden_size)
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
        for name, (dtype, shape) in step_inputs(len(self._spec.groups)).items():
            self._add_input(name, dtype, shape)
        if self._spec.is_hybrid:
            inputs = STATE_INPUTS | (DELTA_INPUTS | PROMPT_INPUTS if self._spec.has_delta_nets else {})
            for name, (dtype, shape) in inputs.items():
                self._add_input(name, dtype, shape)

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
        return self._parts.norm(x, names.embedding_norm, spec.hidden_size)

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
        y = scaled(self._parts.linear(x, prefix + "per_layer_model_projection", width, hidden, False), hidden**-0.5)
        y = self._parts.norm(
            ops.reshape(y, i64([0, layers, own.size]), True), prefix + "per_layer_projection_norm", own.size
        )
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
            return ops.add(x, ops.add(y, self._parts.mlp(normed, n)))
        if layer.mixer is not None:
            y = self._mixer(self._layer_norm(x, n, norms.before_attention), n)
            x = ops.add(x, scaled(self._layer_norm(y, n, norms.after_attention), scale))
        if layer.mlp is None:
            return x
        y = self._parts.mlp(self._layer_norm(x, n, norms.before_mlp), n)
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
        y = self._parts.experts(self._layer_norm(x, n, before), prefix, mixture, x)
        return self._layer_norm(y, n, after)

    def _own_embedding(self, x: Node, n: int, own: LayerEmbeddings) -> Node:
        prefix, hidden = f"{self._spec.names.layers}.{n}.", self._spec.hidden_size
        gate = ACTIVATIONS[own.activation](
            self._parts.linear(x, prefix + "per_layer_input_gate", own.size, hidden, False)
        )
        y = ops.multiply(gate, self._of_layers[n])
        y = self._parts.linear(y, prefix + "per_layer_projection", hidden, own.size, False)
        return self._layer_norm(y, n, "post_per_layer_input_norm")

    def _layer_norm(self, x: Node, n: int, name: str) -> Node:
        return self._parts.norm(x, name and f"{self._spec.names.layers}.{n}.{name}", self._spec.hidden_size)

    def _mixer(self, x: Node, n: int) -> Node:
        layer = self._spec.layers[n]
        assert layer.mixer is not None
        if not isinstance(layer.mixer, Attention):
            return self._recurrent.layer(x, n, layer.mixer)
        y = self._attention.layer(scaled(x, layer.mixer.input_scale), n)
        y = scaled(y, layer.mixer.output_scale)
        return y if layer.with_states is None else ops.add(y, self._recurrent.layer(x, n, layer.with_states))

    def _token_kinds(self, n: int) -> Node | None:
        """Of layer n, for `AttentionLayers`."""
        return None

    def _turning(self, rope: Rope) -> tuple[Node, Frequencies]:
        """For `AttentionLayers`."""
        return ops.unsqueeze(self._inputs["position_ids"], i64([1, 2])), rope.inv_freq[:, None]
