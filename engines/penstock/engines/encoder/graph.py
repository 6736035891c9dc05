"""An encoder's graph: from tokens to one vector or one row of logits for each text. `layout` says what goes in."""

from __future__ import annotations

import openvino as ov
import openvino.opset15 as ops

from penstock.engines.encoder.attention import Attention
from penstock.engines.encoder.layout import Rows, i64
from penstock.engines.encoder.pooling import ACTIVATE, text_vectors
from penstock.engines.encoder.sentence_files import SentenceRecipe
from penstock.engines.encoder.spec import ClassifierSpec, EncoderSpec, RotarySpec
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.weights import Node, Weights


def build_encoder(spec: EncoderSpec, recipe: SentenceRecipe, weights: Weights) -> ov.Model:
    """One output: vectors [B, size], not normalised, or with `spec.classifier` logits [B, labels].

    Raises UnsupportedError when the checkpoint holds tensors that this graph would ignore.
    """
    rows = Rows()
    builder = _Builder(spec, weights, rows)
    x = builder.encode()
    if spec.classifier is None:
        x = text_vectors(x, spec.hidden_size, rows, recipe)
    else:
        x = builder.logits(x, spec.classifier)
    ignored = [name for name in weights.unused() if not name.startswith("pooler.")]
    if ignored:
        raise UnsupportedError(
            f"the checkpoint has {len(ignored)} tensors that no part of the model uses: {ignored[0]} ..."
        )
    # a model without a table of types does not read them
    used = [node for node in rows.inputs.values() if node.output(0).get_target_inputs()]
    return ov.Model([ops.result(x)], used, "encoder")


class _Builder:
    def __init__(self, spec: EncoderSpec, weights: Weights, rows: Rows) -> None:
        self._spec = spec
        self._weights = weights
        self._rows = rows

    def encode(self) -> Node:
        """The hidden state of every token, [T, hidden size]."""
        spec = self._spec
        if spec.rotary is not None:
            return self._rotary_layers(spec.rotary)
        x = self._embed()
        table = None
        if spec.distance_buckets:
            shape = (spec.distance_buckets, spec.num_heads)
            table = self._weights.table("encoder.relative_attention_bias.weight", shape)
        attention = Attention(spec, self._rows, table)
        for n in range(spec.num_layers):
            x = self._layer(x, f"encoder.layer.{n}.", attention)
        return x

    def _embed(self) -> Node:
        spec, inputs = self._spec, self._rows.inputs
        size, look_up = spec.embedding_size, self._weights.look_up
        x = look_up(inputs["input_ids"], "embeddings.word_embeddings.weight", (spec.vocab_size, size))
        positions = ops.add(inputs["positions"], i64(spec.first_position))
        x = ops.add(x, look_up(positions, "embeddings.position_embeddings.weight", (spec.position_rows, size)))
        if spec.type_rows:
            name = "embeddings.token_type_embeddings.weight"
            # a tokenizer may tell two texts apart where the model does not
            types = ops.minimum(inputs["token_types"], i64(spec.type_rows - 1))
            x = ops.add(x, look_up(types, name, (spec.type_rows, size)))
        x = self._norm(x, "embeddings.LayerNorm", size)
        return x if size == spec.hidden_size else self._linear(x, "embeddings_project", spec.hidden_size, size)

    def _layer(self, x: Node, prefix: str, attention: Attention) -> Node:
        """BERT's: a norm after each part."""
        spec = self._spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q, k, v = (
            self._linear(x, f"{prefix}attention.self.{name}", hidden, hidden) for name in ("query", "key", "value")
        )
        y = self._linear(attention(q, k, v), prefix + "attention.output.dense", hidden, hidden)
        x = self._norm(ops.add(x, y), prefix + "attention.output.LayerNorm", hidden)
        y = ACTIVATE[spec.activation](self._linear(x, prefix + "intermediate.dense", inner, hidden))
        y = self._linear(y, prefix + "output.dense", hidden, inner)
        return self._norm(ops.add(x, y), prefix + "output.LayerNorm", hidden)

    def _rotary_layers(self, rotary: RotarySpec) -> Node:
        """ModernBERT's: a norm before each part, and one at the end."""
        spec = self._spec
        hidden, bias = spec.hidden_size, rotary.norm_bias
        table = "embeddings.tok_embeddings.weight"
        x = self._weights.look_up(self._rows.inputs["input_ids"], table, (spec.vocab_size, hidden))
        x = self._norm(x, "embeddings.norm", hidden, bias=bias)
        attention = Attention(spec, self._rows)
        for n in range(spec.num_layers):
            prefix = f"layers.{n}."
            y = self._norm(x, prefix + "attn_norm", hidden, bias=bias) if n else x
            y = self._linear(y, prefix + "attn.Wqkv", 3 * hidden, hidden, bias=rotary.attention_bias)
            q, k, v = ops.split(y, i64(1), 3).outputs()
            y = attention(q, k, v, window=rotary.windows[n], rope=rotary.ropes[n])
            x = ops.add(x, self._linear(y, prefix + "attn.Wo", hidden, hidden, bias=rotary.attention_bias))
            x = ops.add(x, self._gated_mlp(self._norm(x, prefix + "mlp_norm", hidden, bias=bias), prefix, rotary))
        return self._norm(x, "final_norm", hidden, bias=bias)

    def _gated_mlp(self, x: Node, prefix: str, rotary: RotarySpec) -> Node:
        spec = self._spec
        both = self._linear(x, prefix + "mlp.Wi", 2 * spec.intermediate_size, spec.hidden_size, bias=rotary.mlp_bias)
        y, gate = ops.split(both, i64(1), 2).outputs()
        y = ops.multiply(ACTIVATE[spec.activation](y), gate)
        return self._linear(y, prefix + "mlp.Wo", spec.hidden_size, spec.intermediate_size, bias=rotary.mlp_bias)

    def logits(self, x: Node, head: ClassifierSpec) -> Node:
        """[T, hidden size] to [B, labels]."""
        hidden = self._spec.hidden_size
        x = self._rows.mean(x) if head.pooling == "mean" else self._rows.first(x)
        x = ACTIVATE[head.activation](self._linear(x, head.dense, hidden, hidden, bias=head.dense_bias))
        if head.norm:
            x = self._norm(x, head.norm, hidden, bias=head.norm_bias)
        return self._linear(x, head.out, head.num_labels, hidden)

    def _linear(self, x: Node, name: str, out: int, inner: int, *, bias: bool = True) -> Node:
        y = self._weights.project(x, name + ".weight", (out, inner))
        return ops.add(y, self._weights.vector(name + ".bias", out)) if bias else y

    def _norm(self, x: Node, name: str, size: int, *, bias: bool = True) -> Node:
        x = ops.mvn(x, i64([-1]), True, self._spec.norm_eps, "inside_sqrt")
        x = ops.multiply(x, self._weights.vector(name + ".weight", size))
        return ops.add(x, self._weights.vector(name + ".bias", size)) if bias else x
