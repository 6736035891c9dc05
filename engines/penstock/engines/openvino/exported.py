"""Language models as Optimum exports them: OpenVINO IR with keys and values as its state, which attention here gets
from a paged cache in place of that; recurrent layers get theirs from tables of rows.

OpenVINO's own transformation makes the change, the same that OpenVINO GenAI uses; weights stay as they are. Positions
have to come from an input. Where a graph counts them from the length of its state, the transformation gives all tokens
of a step the same one, and the results are wrong without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import openvino as ov
import openvino.opset15 as ops
from openvino._offline_transformations import paged_attention_transformation

from penstock.engines.errors import EngineError, PenstockError, UnsupportedError
from penstock.engines.formats.model_settings import context_length
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder_inputs import step_inputs
from penstock.engines.openvino.graph_nodes import i64
from penstock.engines.openvino.numerics import IntegersType
from penstock.engines.openvino.recurrent import CONV_TABLE, DELTA_TABLE, STATE_INPUTS

_CONTEXT = ("max_position_embeddings", "n_positions", "seq_length")
"""What families call the longest context in config.json."""
_CACHES = ("key_cache.", "value_cache.")
_BEHIND_HEAD = ("Add", "Convert", "Divide", "Multiply", "Subtract")
"""What logits may go through behind the last matrix: a bias, a factor."""
_NO_OPERATION = (
    re.compile(r"Cannot create (?P<name>\S+) layer .* from unsupported opset: (?P<opset>\w+)"),
    re.compile(r"Opset (?P<opset>\w+) doesn't contain the operation with type: (?P<name>\S+)"),
)
_WRITER = re.compile(rb'(?:OpenVINO Runtime|Runtime_version)" value="([\d.]+)')
_RUNTIME_INFO_BYTES = 1 << 20
"""At the end of a graph's file is what wrote it."""
_FOUR_BITS, _EIGHT_BITS = (ov.Type.u4, ov.Type.i4), (ov.Type.u8, ov.Type.i8)


class ExportedGraph(NamedTuple):
    model: ov.Model
    """As `decoder_inputs` says, with one group of layers."""
    vocab_size: int
    num_layers: int
    head_size: int
    integers: IntegersType | None
    """Type of its weights; int4 may be beside int8."""
    is_hybrid: bool
    """Some layers have recurrent states, with inputs as `recurrent` says."""


def context_of(settings: Mapping[str, Any], config: OpenVINOConfig) -> int:
    """The longest context of the model, by config.json. Raises UnsupportedError for what an exported model cannot be
    asked for."""
    if config.weights != "auto":
        raise UnsupportedError(
            f"weights={config.weights}: an exported model's weights stay as they are; export it in that type",
            param="weights",
        )
    if config.max_loras:
        raise UnsupportedError("LoRA adapters are not supported with a model that OpenVINO's tools exported")
    if settings.get("text_config") is not None:
        raise UnsupportedError("config.json has text_config: multimodal models are not supported")
    longest = next((settings[key] for key in _CONTEXT if settings.get(key) is not None), None)
    if type(longest) is not int or longest < 1:
        raise UnsupportedError(f"config.json has none of {', '.join(_CONTEXT)}")
    longest = context_length({**settings, "max_position_embeddings": longest}, config.max_model_len) or longest
    _check_window(settings, min(longest, config.max_model_len or longest))
    return longest


def _check_window(settings: Mapping[str, Any], served: int) -> None:
    window = settings.get("sliding_window")
    if window is None or settings.get("use_sliding_window") is False:
        return
    if type(window) is not int or window < served:
        raise UnsupportedError(
            f"config.json has sliding_window={str(window)[:50]}, which is not supported with a model that OpenVINO's "
            "tools exported, unless max_model_len is not above it"
        )


def read_graph(file: Path) -> ov.Model:
    """Raises EngineError for a file that cannot be read, UnsupportedError for one with operations of other releases."""
    try:
        return ov.Core().read_model(file)
    except RuntimeError as error:
        raise _unreadable(file, error) from error


def read_exported(graph: Path) -> ExportedGraph:
    """Raises as `read_graph`, and UnsupportedError for a graph of another kind."""
    model = read_graph(graph)
    gives_logits = any("logits" in port.get_names() for port in model.outputs[:1])
    if not model.get_sinks() or "input_ids" not in _names(model) or not gives_logits:
        raise UnsupportedError(
            f"{graph.name} is no language model with a state, from input_ids to logits: export one with "
            "--task text-generation-with-past"
        )
    _read_positions(model)
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise UnsupportedError(f"the attention of {graph.name} cannot be paged: {_first_line(error)}") from error
    names = _names(model)
    caches = {name for name in names if name.startswith(_CACHES)}
    tables = {name for name in names if name.startswith((CONV_TABLE, DELTA_TABLE))}
    known = {*step_inputs(1), *(STATE_INPUTS if tables else ())} - {"sampled_tokens_indices"}
    strange = [port.any_name for port in model.inputs if not port.get_names() & (caches | tables | known)]
    strange = sorted(strange) + sorted(known - names)
    if strange or not caches or model.get_sinks():
        named = f": {strange[0]}" if strange else ""
        raise UnsupportedError(f"{graph.name} has other inputs or states than those of a decoder{named}")
    if _counts_positions(model):
        raise UnsupportedError(
            f"{graph.name} counts positions from the length of its state, not from its input position_ids: "
            "steps of several tokens or requests would be computed wrongly; serve the weights that it was exported from"
        )
    return _with_chosen_tokens(model, graph.name, len(caches) // 2, is_hybrid=bool(tables))


def _read_positions(model: ov.Model) -> None:
    """Makes a graph as Optimum exports that of Qwen3.5 read position_ids: it has the input, and counts positions
    itself, three of each token, all of them the same."""
    positions = _input(model, "position_ids")
    if positions is None or positions.get_target_inputs() or len(positions.get_partial_shape()) != _AXES:
        return
    counted = {node.get_friendly_name(): node for cos in _nodes(model, "Cos") for node in _in_threes(cos)}
    if len(counted) == 1:
        [node] = counted.values()
        node.input(0).replace_source_output(ops.unsqueeze(positions, i64(0)).output(0))
        model.validate_nodes_and_infer_types()


_AXES = 2
"""Of position_ids: sequences and tokens."""


def _in_threes(node: Any) -> Iterator[Any]:
    """What gives each token its position three times, above a node."""
    above, seen = [node], set()
    while above:
        one = above.pop()
        if one.get_friendly_name() in seen:
            continue
        seen.add(one.get_friendly_name())
        shape = one.get_output_partial_shape(0)
        if one.get_type_name() == "Broadcast" and len(shape) == 1 + _AXES and shape[0] == ov.Dimension(3):
            yield one
        else:
            above += [one.input_value(n).get_node() for n in range(one.get_input_size())]


def _counts_positions(model: ov.Model) -> bool:
    """Whether anything but attention reads the length of the context, and nothing reads positions."""
    positions, length = _input(model, "position_ids"), _input(model, "max_context_len")
    if positions is None or length is None or positions.get_target_inputs():
        return False
    return any(reader.get_node().get_type_name() != _ATTENTION for reader in length.get_target_inputs())


_ATTENTION = "PagedAttentionExtension"


def _input(model: ov.Model, name: str) -> Any:
    """None: there is none of this name."""
    return next((port for port in model.inputs if name in port.get_names()), None)


def _unreadable(graph: Path, error: Exception) -> PenstockError:
    """What is said of a graph that OpenVINO does not read; where an operation is one of other releases, its name and
    that of the release that wrote the file."""
    operation = next((match for pattern in _NO_OPERATION if (match := pattern.search(str(error)))), None)
    if operation is None:
        return EngineError(f"{graph.name} cannot be read: {_first_line(error)}")
    with graph.open("rb") as file:
        file.seek(max(0, graph.stat().st_size - _RUNTIME_INFO_BYTES))
        writer = _WRITER.search(file.read())
    written = f", and was written by OpenVINO {writer[1].decode()}" if writer else ""
    return UnsupportedError(
        f"{graph.name} has the operation {operation['name']} of {operation['opset']}{written}; OpenVINO "
        f"{ov.__version__.partition('-')[0]}, which is installed, does not have it"
    )


def _names(model: ov.Model) -> set[str]:
    return {name for port in model.inputs for name in port.get_names()}


def _with_chosen_tokens(model: ov.Model, name: str, num_layers: int, *, is_hybrid: bool) -> ExportedGraph:
    """Logits only where they are asked for, and the hidden states that they come from."""
    logits = model.get_results()[0].input_value(0)
    head = logits.get_node()
    while head.get_type_name() in _BEHIND_HEAD:
        head = head.input_value(0).get_node()
    if head.get_type_name() != "MatMul":
        raise UnsupportedError(f"the logits of {name} do not come from a matrix, but from {head.get_type_name()}")
    indices = ops.parameter(ov.PartialShape([-1]), ov.Type.i64, name="sampled_tokens_indices")
    indices.output(0).set_names({"sampled_tokens_indices"})
    hidden = ops.gather(head.input_value(0), indices, i64(0))
    head.input(0).replace_source_output(hidden.output(0))
    results = []
    for node, output in (("logits", logits), ("hidden", hidden.output(0))):
        rows = ops.convert(ops.reshape(output, i64([0, -1]), True), "f32")
        rows.output(0).set_names({node})
        results.append(ops.result(rows))
    integers, attention = _integers(model), _nodes(model, _ATTENTION)[0]
    head_size = int(attention.get_rt_info()["k_head_size"].value)
    whole = ov.Model(results, [*model.get_parameters(), indices], "decoder")
    vocab_size = whole.output(0).partial_shape[-1]
    if not vocab_size.is_static:
        raise UnsupportedError(f"the logits of {name} have no fixed number of tokens")
    return ExportedGraph(whole, vocab_size.get_length(), num_layers, head_size, integers, is_hybrid)


def _integers(model: ov.Model) -> IntegersType | None:
    matrices = [node for node in _nodes(model, "Constant") if len(node.get_output_shape(0)) > 1]
    kinds = {node.get_element_type() for node in matrices}
    if kinds.intersection(_FOUR_BITS):
        return "int4"
    return "int8" if kinds.intersection(_EIGHT_BITS) else None


def _nodes(model: ov.Model, kind: str) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def _first_line(error: Exception) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), "")[:300]
