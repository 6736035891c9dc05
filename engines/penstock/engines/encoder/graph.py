"""Graphs of encoders, from tokens to one vector or one row of logits for each text: built here, or exported as ONNX or
OpenVINO IR by Optimum and sentence-transformers. `rows` says what goes in.

An exported graph takes a padded row for each text. Its inputs are replaced by what `TextRows` makes of a batch, and
pooling stands behind it, so that an exported model is fed and answers like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import openvino as ov
import openvino.opset15 as ops

from penstock.engines.encoder.families import ClassifierSpec, EncoderSpec, RotarySpec
from penstock.engines.encoder.model_folder import EncoderOutline, SentenceRecipe
from penstock.engines.encoder.rows import TextAttention, TextRows
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.exported import read_graph
from penstock.engines.openvino.graph_nodes import Node, i64
from penstock.engines.openvino.weights import Weights


def build_encoder(spec: EncoderSpec, recipe: SentenceRecipe, weights: Weights) -> ov.Model:
    """One output: vectors [B, size], not normalised, or with `spec.classifier` logits [B, labels].

    Raises UnsupportedError when the checkpoint holds tensors that this graph would ignore.
    """
    rows = TextRows()
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
    def __init__(self, spec: EncoderSpec, weights: Weights, rows: TextRows) -> None:
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
        attention = TextAttention(spec, self._rows, table)
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

    def _layer(self, x: Node, prefix: str, attention: TextAttention) -> Node:
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
        attention = TextAttention(spec, self._rows)
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


ACTIVATE: dict[str, Callable[[Node], Node]] = {
    "": lambda x: x,
    "gelu": lambda x: ops.gelu(x, "erf"),
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "relu": ops.relu,
    "silu": ops.swish,
    "tanh": ops.tanh,
}


def text_vectors(x: Node, size: int, rows: TextRows, recipe: SentenceRecipe) -> Node:
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


def _pooled(x: Node, mode: str, rows: TextRows) -> Node:
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


_TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
_TEXT_OUTPUT = "sentence_embedding"
_LOGITS = "logits"


def build_exported(outline: EncoderOutline, recipe: SentenceRecipe) -> ov.Model:
    """One output, like that of `build_encoder`: vectors [B, size], or logits [B, labels].

    Raises EngineError for a file that cannot be read, UnsupportedError for inputs or outputs of another kind.
    """
    path = outline.graph_file
    assert path is not None
    graph, rows = read_graph(path), TextRows()
    _connect(graph, rows, path.name)
    result = _result(graph, rows, outline, recipe, path.name)
    used = [node for node in rows.inputs.values() if node.output(0).get_target_inputs()]
    try:
        return ov.Model([ops.result(result)], used, "exported encoder")
    except RuntimeError as error:
        raise UnsupportedError(f"{path.name} does not take texts of any number and length: {error}") from error


def _connect(graph: ov.Model, rows: TextRows, file: str) -> None:
    """Puts the rows in the place of the graph's inputs."""
    padded = {
        "input_ids": lambda: rows.spread(rows.inputs["input_ids"]),
        "attention_mask": lambda: ops.convert(rows.present, "i64"),
        "token_type_ids": lambda: rows.spread(rows.inputs["token_types"]),
        "position_ids": lambda: rows.spread(rows.inputs["positions"]),
    }
    for parameter in graph.get_parameters():
        output = parameter.output(0)
        name = next((name for name in padded if name in output.get_names()), None)
        if name is None:
            raise UnsupportedError(f"{file} has the input {output.any_name}; known are {', '.join(padded)}")
        output.replace(ops.convert(padded[name](), output.get_element_type()).output(0))


def _result(graph: ov.Model, rows: TextRows, outline: EncoderOutline, recipe: SentenceRecipe, file: str) -> Node:
    outputs = {name: output for output in graph.outputs for name in output.get_names()}
    if outline.num_labels is not None:
        if _LOGITS not in outputs:
            raise UnsupportedError(f"{file} has no output {_LOGITS}, though config.json names a classifier")
        return _source(outputs[_LOGITS])
    for name in _TOKEN_OUTPUTS:
        if name in outputs:
            size = outputs[name].get_partial_shape()[2]
            if size.is_dynamic:
                raise UnsupportedError(f"{file} does not say how long the vectors of {name} are")
            x = rows.collect(_source(outputs[name]), size.get_length())
            return text_vectors(x, size.get_length(), rows, recipe)
    if _TEXT_OUTPUT in outputs and recipe.pooling and not recipe.dense:
        return _source(outputs[_TEXT_OUTPUT])
    raise UnsupportedError(
        f"{file} has the outputs {', '.join(sorted(outputs))}; needed is one of {', '.join(_TOKEN_OUTPUTS)}"
    )


def _source(output: ov.Output) -> Node:
    return ops.convert(output.get_node().input_value(0), "f32")
