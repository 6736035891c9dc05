"""Recurrent layers in a graph, and the tables of their states.

The plugin has operations that read and write states by rows, but Python has no classes for them. They come out of the
pass that pages attention: it makes them of a graph with states of its own, so one is built here that has just what the
pass looks for, and the operation is taken out of it. Inputs of the operation, for T tokens of S requests: a table
[rows, channels, kernel], subsequence_begins, and `STATE_INPUTS`, i32 all: block_indices has the rows of all requests,
one after another, block_indices_begins [S + 1] where those of each request begin, past_lens [S] the tokens before the
step, and cache_interval [S] how many tokens are between checkpoints. The first row of a request is read; the following
ones get the states at each multiple of the interval, and behind the last token.

Row 0 of every table has zeros: it is what a request's first token reads. Row r + 1 is row r of `ModelInfo.states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino._offline_transformations import paged_attention_transformation

from penstock.engines.errors import InvalidRequestError
from penstock.engines.kit.batch import GroupTables, Int32s, StepBatch
from penstock.engines.openvino.decoder_inputs import Input
from penstock.engines.openvino.graph_nodes import Node, f32, i64

_INDICES, _BEGINS = "la.block_indices", "la.block_indices_begins"
_PAST, _INTERVAL = "la.past_lens", "la.cache_interval"
STATE_INPUTS: dict[str, Input] = {name: (np.int32, [-1]) for name in (_INDICES, _BEGINS, _PAST, _INTERVAL)}
CONV_TABLE = "conv_state_table."
"""In front of the number of the layer. The plugin gives such inputs the type of the computation."""


def paged_convolution(x: Node, table: Node, kernel: Node, bias: Node | None, inputs: Mapping[str, Node]) -> Node:
    """[T, channels]: each channel of x is folded with its own kernel over the token and those before it. `kernel`
    [channels, 1, size], `bias` [channels], `inputs`: subsequence_begins and `STATE_INPUTS`."""
    node = _made_by_pass("PagedCausalConv1D")
    operands = [x, table, kernel, f32([]) if bias is None else bias, inputs["subsequence_begins"]]
    operands += [inputs[name] for name in (_INDICES, _BEGINS, _PAST, _INTERVAL)]
    for index, operand in enumerate(operands):
        node.set_argument(index, operand.output(0))
    node.validate_and_infer_types()
    return node


_CHANNELS, _KERNEL = 2, 2
"""Of the graph that the operation is taken out of: any sizes will do."""


def _made_by_pass(kind: str) -> Node:
    model = _stateful_graph()
    paged_attention_transformation(model)
    return next(node for node in model.get_ordered_ops() if node.get_type_name() == kind)


def _stateful_graph() -> ov.Model:
    """A convolution, and the attention without which the pass does nothing, as Optimum exports them: with axis 2 in
    place of -1, for one, the pass does not know a convolution."""
    ids, mask, positions = (_parameter(name, [-1, -1]) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = _parameter("beam_idx", [-1], np.int32)
    batch = ops.gather(ops.shape_of(ids), i64([0]), i64(0))
    sinks: list[Node] = []
    x = ops.gather(f32(np.zeros((1, _CHANNELS))), ids, i64(0))
    columns = ops.transpose(x, i64([0, 2, 1]))
    state = partial(_state, batch=batch, beams=beams, sinks=sinks)
    past = state("conv", [_CHANNELS, _KERNEL], columns, axis=-1, kept=_KERNEL)
    y = ops.group_convolution(past, f32(np.zeros((_CHANNELS, 1, 1, _KERNEL))), [1], [0], [0], [1])
    length = ops.gather(ops.shape_of(ids), i64([1]), i64(0))
    y = ops.slice(y, ops.multiply(length, i64([-1])), i64([_END]), i64([1]), i64([2]))
    heads = ops.unsqueeze(ops.add(x, ops.transpose(y, i64([0, 2, 1]))), i64([1]))
    keys, values = (state(name, [1, 0, _CHANNELS], heads, axis=2) for name in ("key", "value"))
    sees = ops.convert(ops.unsqueeze(mask, i64([1, 2])), "f32")
    result = ops.result(ops.scaled_dot_product_attention(heads, keys, values, sees))
    return ov.Model([result], sinks, [ids, mask, positions, beams], "stateful")


_END = np.iinfo(np.int64).max


def _state(
    name: str, shape: list[int], new: Node, *, axis: int, kept: int = 0, batch: Node, beams: Node, sinks: list[Node]
) -> Node:
    """What a state had and `new`, along an axis: the state then, or the last `kept` of it."""
    zeros = ops.broadcast(f32(0.0), ops.concat([batch, i64(shape)], 0))
    known = ov.PartialShape([-1, *(size or -1 for size in shape)])
    past = ops.gather(ops.read_value(zeros, name, ov.Type.f32, known), beams, i64(0))
    whole = ops.concat([past, new], axis)
    rest = ops.slice(whole, i64([-kept]), i64([_END]), i64([1]), i64([axis])) if kept else whole
    sinks.append(ops.assign(rest, name))
    return whole


def _parameter(name: str, shape: list[int], kind: type = np.int64) -> Node:
    node = ops.parameter(ov.PartialShape(shape), kind, name=name)
    node.output(0).set_names({name})
    return node


class StateTables:
    """Tables of a compiled model: one for each recurrent layer, [rows + 1, ...]."""

    def __init__(self, compiled: Any, num_rows: int) -> None:
        self._tensors = {}
        for name, kind, shape in _tables_of(compiled):
            tensor = ov.Tensor(kind, ov.Shape([num_rows + 1, *shape]))
            tensor.data[0] = 0
            self._tensors[name] = tensor

    def bind(self, request: Any) -> None:
        """Makes these the tables of an infer request."""
        for name, tensor in self._tensors.items():
            request.set_tensor(name, tensor)


def row_bytes(compiled: Any) -> int:
    """Of one row in all layers; 0: the model has no recurrent ones."""
    return sum(int(np.prod(shape)) * kind.bitwidth // 8 for _, kind, shape in _tables_of(compiled))


def _tables_of(compiled: Any) -> list[tuple[str, Any, list[int]]]:
    """Name, type and shape of a row, for each table."""
    return [
        (port.any_name, port.element_type, [axis.get_length() for axis in list(port.partial_shape)[1:]])
        for port in compiled.inputs
        if port.any_name.startswith(CONV_TABLE)
    ]


def state_inputs(batch: StepBatch, tables: GroupTables, interval: int) -> dict[str, Int32s]:
    """`STATE_INPUTS` of a batch; `tables`: of its requests' rows, as the contract has them."""
    first, last = batch.computed // interval, tables.end
    begins = np.zeros(len(last) + 1, np.int32)
    np.cumsum(1 + last - first, out=begins[1:])
    rows = np.empty(begins[-1], np.int32)
    is_read = np.zeros(len(rows), np.bool_)
    is_read[begins[:-1]] = True
    before = np.maximum(batch.computed - 1, 0) // interval
    rows[is_read] = np.where(batch.computed > 0, tables.block_ids[np.arange(len(last)), before] + 1, 0)
    entries = np.arange(tables.block_ids.shape[1])
    written = (entries >= first[:, None]) & (entries < last[:, None])
    rows[~is_read] = tables.block_ids[written] + 1
    intervals = np.full(len(last), interval, np.int32)
    return {_INDICES: rows, _BEGINS: begins, _PAST: batch.computed.astype(np.int32), _INTERVAL: intervals}


def state_interval(setting: int | None, row_bytes: int, block_bytes: int, block_size: int) -> int:
    """Tokens between checkpoints. None: a few whole blocks, so that states take no more memory than keys and values.
    Raises InvalidRequestError for a setting that does not fit the blocks."""
    if setting is None:
        interval = block_size
        while interval < _LONGEST_INTERVAL and row_bytes * block_size > interval * block_bytes:
            interval *= 2
        return interval
    if setting % block_size:
        raise InvalidRequestError(
            f"state_interval={setting} is not a multiple of the {block_size} tokens of a block", param="state_interval"
        )
    return setting


_LONGEST_INTERVAL = 1024
"""Tokens that may have to be computed again, at most, behind a prefix hit."""
