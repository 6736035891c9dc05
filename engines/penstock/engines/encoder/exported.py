"""Encoders that bring their own graph: ONNX or OpenVINO IR, as Optimum and sentence-transformers export them.

Such a graph takes a padded row for each text. Its inputs are replaced by what `Rows` makes of a batch, and pooling
stands behind it, so that an exported model is fed and answers like any other.
"""

from __future__ import annotations

import openvino as ov
import openvino.opset15 as ops

from penstock.engines.encoder.layout import Rows
from penstock.engines.encoder.outline import EncoderOutline
from penstock.engines.encoder.pooling import text_vectors
from penstock.engines.encoder.sentence_files import SentenceRecipe
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.exported import unreadable
from penstock.engines.openvino.weights import Node

_TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
_TEXT_OUTPUT = "sentence_embedding"
_LOGITS = "logits"


def build_exported(core: ov.Core, outline: EncoderOutline, recipe: SentenceRecipe) -> ov.Model:
    """One output, like that of `build_encoder`: vectors [B, size], or logits [B, labels].

    Raises EngineError for a file that cannot be read, UnsupportedError for inputs or outputs of another kind.
    """
    path = outline.graph_file
    assert path is not None
    try:
        given = core.read_model(path)
    except RuntimeError as error:
        raise unreadable(path, error) from error
    rows = Rows()
    _connect(given, rows, path.name)
    result = _result(given, rows, outline, recipe, path.name)
    used = [node for node in rows.inputs.values() if node.output(0).get_target_inputs()]
    try:
        return ov.Model([ops.result(result)], used, "exported encoder")
    except RuntimeError as error:
        raise UnsupportedError(f"{path.name} does not take texts of any number and length: {error}") from error


def _connect(given: ov.Model, rows: Rows, file: str) -> None:
    """Puts the rows in the place of the graph's inputs."""
    padded = {
        "input_ids": lambda: rows.spread(rows.inputs["input_ids"]),
        "attention_mask": lambda: ops.convert(rows.present, "i64"),
        "token_type_ids": lambda: rows.spread(rows.inputs["token_types"]),
        "position_ids": lambda: rows.spread(rows.inputs["positions"]),
    }
    for parameter in given.get_parameters():
        output = parameter.output(0)
        name = next((name for name in padded if name in output.get_names()), None)
        if name is None:
            raise UnsupportedError(f"{file} has the input {output.any_name}; known are {', '.join(padded)}")
        output.replace(ops.convert(padded[name](), output.get_element_type()).output(0))


def _result(given: ov.Model, rows: Rows, outline: EncoderOutline, recipe: SentenceRecipe, file: str) -> Node:
    outputs = {name: output for output in given.outputs for name in output.get_names()}
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
