"""Recurrent layers in a graph, and the tables of their states.

The plugin has operations that read and write states by rows, but Python has no classes for them. They come out of the
pass that pages attention: it makes them of a graph with states of its own, so one is built here that has just what the
pass looks for, and the operation is taken out of it. Inputs of the operations, for T tokens of S requests: a table
([rows, channels, kernel], or [rows, heads, value size, key size]), subsequence_begins, and `STATE_INPUTS`, i32 all:
block_indices has the rows of all requests, one after another, block_indices_begins [S + 1] where those of each request
begin, past_lens [S] the tokens before the step, and cache_interval [S] how many tokens are between checkpoints. The
first row of a request is read; the following ones get the states at each multiple of the interval, and behind the last
token. A row may stand there several times: it keeps the last of its states.

Row 0 of every table has zeros: it is what a request's first token reads. Row r + 1 is row r of `ModelInfo.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset1 as opset1
import openvino.opset15 as ops
from openvino._offline_transformations import paged_attention_transformation

from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, GroupTables, Int32s, Ints, StepBatch, row_ends
from penstock.engines.kit.block_rows import BlockRows
from penstock.engines.openvino.decoder_inputs import Input
from penstock.engines.openvino.graph_nodes import Node, f32, i64

_INDICES, _BEGINS = "la.block_indices", "la.block_indices_begins"
_PAST, _INTERVAL = "la.past_lens", "la.cache_interval"
STATE_INPUTS: dict[str, Input] = {name: (np.int32, [-1]) for name in (_INDICES, _BEGINS, _PAST, _INTERVAL)}
_ALONE = "alone."
_SEQUENCES = "subsequence_begins"
DELTA_INPUTS = {_ALONE + name: kind for name, kind in STATE_INPUTS.items()} | {_ALONE + _SEQUENCES: (np.int32, [-1])}
"""The same, and subsequence_begins, of the requests whose delta nets the operation computes. `delta_prompts` has the
others."""
CONV_TABLE, DELTA_TABLE = "conv_state_table.", "gated_delta_state_table."
"""In front of the number of the layer. The plugin gives such inputs the type of the computation."""
KEPT_STATES = "kept_states."
"""The same of outputs: `prompt_delta_net` says which states."""


def paged_convolution(x: Node, table: Node, kernel: Node, bias: Node | None, inputs: Mapping[str, Node]) -> Node:
    """[T, channels]: each channel of x is folded with its own kernel over the token and those before it. `kernel`
    [channels, 1, size], `bias` [channels], `inputs`: subsequence_begins and `STATE_INPUTS`."""
    operands = [x, table, kernel, f32([]) if bias is None else bias]
    return _with_operands("PagedCausalConv1D", operands, inputs)


def paged_delta_net(
    q: Node, k: Node, v: Node, table: Node, decay: Node, beta: Node, inputs: Mapping[str, Node]
) -> Node:
    """[T, value heads, value size]. `q` and `k` are [T, key heads, key size], of length 1; `v` as the result; `decay`,
    a logarithm, and `beta` are [T, value heads]. Queries are scaled by the operation. `inputs`: `DELTA_INPUTS`; what
    belongs to none of their requests is undefined."""
    alone = {name.removeprefix(_ALONE): inputs[name] for name in DELTA_INPUTS}
    return _with_operands("PagedGatedDeltaNet", [q, k, v, table, decay, beta], alone)


def _with_operands(kind: str, operands: list[Node], inputs: Mapping[str, Node]) -> Node:
    """The operation, with operands of its own, the step's, and `STATE_INPUTS`."""
    node = _made_by_pass(kind)
    operands += [inputs[name] for name in (_SEQUENCES, _INDICES, _BEGINS, _PAST, _INTERVAL)]
    for index, operand in enumerate(operands):
        node.set_argument(index, operand.output(0))
    node.validate_and_infer_types()
    return node


_SIZE = 2
"""Of channels, kernels and heads in the graph that an operation is taken out of: any size will do."""
_END = np.iinfo(np.int64).max


def _made_by_pass(kind: str) -> Node:
    model = _stateful_graph(_convolved if kind == "PagedCausalConv1D" else _delta_net)
    paged_attention_transformation(model)
    return next(node for node in model.get_ordered_ops() if node.get_type_name() == kind)


class _States:
    """Of a graph that has them itself."""

    def __init__(self, ids: Node, beams: Node) -> None:
        self.batch = ops.gather(ops.shape_of(ids), i64([0]), i64(0))
        self.length = ops.gather(ops.shape_of(ids), i64([1]), i64(0))
        self.sinks: list[Node] = []
        self._beams = beams

    def read(self, name: str, shape: list[int]) -> Node:
        """0 in `shape`: any number."""
        zeros = ops.broadcast(f32(0.0), ops.concat([self.batch, i64(shape)], 0))
        known = ov.PartialShape([-1, *(size or -1 for size in shape)])
        return ops.gather(ops.read_value(zeros, name, ov.Type.f32, known), self._beams, i64(0))

    def write(self, name: str, value: Node) -> None:
        self.sinks.append(ops.assign(value, name))

    def grow(self, name: str, shape: list[int], new: Node) -> Node:
        """What a state had and `new`, along axis 2."""
        whole = ops.concat([self.read(name, shape), new], 2)
        self.write(name, whole)
        return whole


def _stateful_graph(layer: Callable[[Node, _States], Node]) -> ov.Model:
    """A recurrent layer over [B, T, _SIZE], and the attention without which the pass does nothing."""
    ids, mask, positions = (_parameter(name, [-1, -1]) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = _parameter("beam_idx", [-1], np.int32)
    states = _States(ids, beams)
    heads = ops.unsqueeze(layer(ops.gather(f32(np.zeros((1, _SIZE))), ids, i64(0)), states), i64([1]))
    keys, values = (states.grow(name, [1, 0, _SIZE], heads) for name in ("key", "value"))
    sees = ops.convert(ops.unsqueeze(mask, i64([1, 2])), "f32")
    result = ops.result(ops.scaled_dot_product_attention(heads, keys, values, sees))
    return ov.Model([result], states.sinks, [ids, mask, positions, beams], "stateful")


def _convolved(x: Node, states: _States) -> Node:
    """As Optimum exports it: with axis 2 in place of -1, for one, the pass does not know a convolution."""
    past = ops.concat([states.read("conv", [_SIZE, _SIZE]), ops.transpose(x, i64([0, 2, 1]))], -1)
    states.write("conv", ops.slice(past, i64([-_SIZE]), i64([_END]), i64([1]), i64([2])))
    y = ops.group_convolution(past, f32(np.zeros((_SIZE, 1, 1, _SIZE))), [1], [0], [0], [1])
    y = ops.slice(y, ops.multiply(states.length, i64([-1])), i64([_END]), i64([1]), i64([2]))
    return ops.transpose(y, i64([0, 2, 1]))


def _delta_net(x: Node, states: _States) -> Node:
    """One head."""
    heads = ops.transpose(ops.unsqueeze(x, i64([2])), i64([0, 2, 1, 3]))
    number = ops.transpose(ops.slice(x, i64([0]), i64([1]), i64([1]), i64([2])), i64([0, 2, 1]))
    before = states.read("delta", [1, _SIZE, _SIZE])
    y, state = delta_loop((heads, heads, heads, number, number), before, (1, _SIZE, _SIZE), states.length)
    states.write("delta", ops.reshape(state, i64([0, 1, _SIZE, _SIZE]), True))
    return ops.reshape(ops.transpose(y, i64([0, 2, 1, 3])), i64([0, 0, _SIZE]), True)


def delta_loop(
    operands: tuple[Node, Node, Node, Node, Node], before: Node, sizes: tuple[int, int, int], length: Node
) -> tuple[Node, Node]:
    """A gated delta net token by token, of which the plugin makes one operation: outputs [B, heads, T, value size], and
    the states behind the last tokens [B, heads, key size, value size], as those `before` the first ones. `operands`:
    queries, to be scaled, keys and values [B, heads, T, size], decay and beta [B, heads, T]. `sizes`: heads, and of a
    key and a value; `length` [1]: T.

    The loop is known by the order of its inputs, outputs and results, by squeezes of the first opset, and by a scale
    that is taken from the shape of the queries."""
    q, k, v, decay, beta = operands
    heads, key, value = sizes
    scale = ops.power(ops.convert(ops.gather(ops.shape_of(q), i64(3), i64(0)), "f32"), f32(0.5))
    sliced, merged = [ops.divide(q, scale), k, v, decay, beta], [before, ops.broadcast(f32(0.0), ops.shape_of(v))]
    shapes = [[-1, heads, 1, key]] * 2 + [[-1, heads, 1, value]] + [[-1, heads, 1]] * 2
    shapes += [[-1, heads, key, value], [-1, heads, -1, value]]
    token, *inner = [ops.parameter([], np.int64), *(ops.parameter(shape, np.float32) for shape in shapes)]
    results = _delta_step(token, inner)
    goes_on = ops.constant(np.array(True))
    body = ov.Model([ops.result(node) for node in (goes_on, *results)], [token, *inner], "token")
    loop = ops.loop(ops.reduce_sum(length, i64([0]), False), ops.constant(np.array(True)))
    loop.set_function(body)
    loop.set_special_body_ports([0, 0])
    for parameter, node in zip(inner, sliced, strict=False):
        loop.set_sliced_input(parameter, node.output(0), 0, 1, 1, -1, 2)
    for parameter, node, result in zip(inner[5:], merged, results, strict=True):
        loop.set_merged_input(parameter, node.output(0), result.output(0))
    y, state = (loop.get_iter_value(result.output(0), -1) for result in reversed(results))
    return y, state


def _delta_step(token: Node, inputs: list[Node]) -> tuple[Node, Node]:
    """The state behind a token, and the results with its own."""
    q, k, v, decay, beta, state, done = inputs
    q, k, v = (opset1.squeeze(x, i64([2])) for x in (q, k, v))
    kept = ops.multiply(state, ops.unsqueeze(ops.exp(decay), i64(-1)))
    known = ops.reduce_sum(ops.multiply(kept, ops.unsqueeze(k, i64(-1))), i64([-2]), False)
    correction = ops.unsqueeze(ops.multiply(ops.subtract(v, known), beta), i64(-2))
    state = ops.add(kept, ops.multiply(ops.unsqueeze(k, i64(-1)), correction))
    y = ops.reduce_sum(ops.multiply(state, ops.unsqueeze(q, i64(-1))), i64([-2]), True)
    return state, ops.scatter_update(done, ops.unsqueeze(token, i64(0)), y, i64(2))


def _parameter(name: str, shape: list[int], kind: type = np.int64) -> Node:
    node = ops.parameter(ov.PartialShape(shape), kind, name=name)
    node.output(0).set_names({name})
    return node


class StateTables:
    """Tables of a compiled model: one for each recurrent layer, [rows + 1, ...]."""

    def __init__(self, compiled: Any, num_rows: int) -> None:
        self._tensors, self._kept = {}, {}
        kept_ones = {name for port in compiled.outputs for name in port.get_names() if name.startswith(KEPT_STATES)}
        for name, kind, shape in _tables_of(compiled):
            tensor = ov.Tensor(kind, ov.Shape([num_rows + 1, *shape]))
            tensor.data[0] = 0
            self._tensors[name] = tensor
            if _kept_state(name) in kept_ones:
                self._kept[name] = ov.Tensor(kind, ov.Shape([0, *shape]))
        raw = [tensor.data.view(np.uint8).reshape(num_rows + 1, -1)[1:] for tensor in self._tensors.values()]
        self.rows = BlockRows(raw)
        """Their bytes, by the numbers of `ModelInfo.states`."""

    def bind(self, request: Any) -> None:
        """Makes these the tables of an infer request. What it keeps is put into rows before another one computes, so
        all of them have the same memory for that."""
        for name, tensor in self._tensors.items():
            request.set_tensor(name, tensor)
        for name, tensor in self._kept.items():
            request.set_tensor(_kept_state(name), tensor)

    def put_kept(self, rows: Int32s) -> None:
        """States that the last infer request kept, into these rows."""
        for name, tensor in self._kept.items():
            self._tensors[name].data[rows] = tensor.data


def states_layout(compiled: Any) -> str:
    """How rows are laid out; empty: there are none."""
    return "".join(repr((name, str(kind), shape)) for name, kind, shape in _tables_of(compiled))


def row_bytes(compiled: Any) -> int:
    """Of one row in all layers; 0: the model has no recurrent ones."""
    return sum(int(np.prod(shape)) * kind.bitwidth // 8 for _, kind, shape in _tables_of(compiled))


def _kept_state(table: str) -> str:
    return KEPT_STATES + table.removeprefix(DELTA_TABLE)


def _tables_of(compiled: Any) -> list[tuple[str, Any, list[int]]]:
    """Name, type and shape of a row, for each table."""
    return [
        (port.any_name, port.element_type, [axis.get_length() for axis in list(port.partial_shape)[1:]])
        for port in compiled.inputs
        if port.any_name.startswith((CONV_TABLE, DELTA_TABLE))
    ]


def state_inputs(batch: StepBatch, tables: GroupTables, block_size: int) -> dict[str, Int32s]:
    """`STATE_INPUTS` of a batch; `tables`: of its requests' rows, as the contract has them."""
    ids, requests, ends = tables.block_ids, np.arange(len(batch.computed)), batch.computed + batch.scheduled
    read = rows_before(batch, tables, block_size)
    first, last = (ids[requests, at // block_size] + 1 for at in (batch.computed, ends - 1))
    intervals = ends + 1  # no checkpoint within a step, unless the row changes there
    counts = np.full(len(requests) + 1, 2)
    counts[0] = 0
    rows = [np.stack([read, last], 1).ravel()]
    changing = np.flatnonzero(first != last)
    if len(changing) or batch.state_writes:
        rows = list(rows[0].reshape(-1, 2))
        for i, beside in batch.state_writes.items():
            intervals[i], counts[i + 1] = 1, 2 + len(beside)
            rows[i] = np.array([read[i], *(row + 1 for row in beside), last[i]])
        for i in changing.tolist():
            start, end = int(batch.computed[i]), int(ends[i])
            interval = intervals[i] = gcd(*row_ends(ids[i], start, end, block_size)[:-1])
            stops = np.minimum(np.arange(start // interval + 1, -(-end // interval) + 1) * interval, end)
            rows[i] = np.append(read[i], ids[i, (stops - 1) // block_size] + 1)
            counts[i + 1] = len(rows[i])
    return {
        _INDICES: np.concatenate(rows).astype(np.int32),
        _BEGINS: np.cumsum(counts, dtype=np.int32),
        _PAST: batch.computed.astype(np.int32),
        _INTERVAL: intervals.astype(np.int32),
    }


def rows_before(batch: StepBatch, tables: GroupTables, block_size: int) -> Int32s:
    """[S]: which row of the tables each request of a batch goes on from. `tables`: as `state_inputs` has them."""
    before = np.maximum(batch.computed - 1, 0) // block_size
    rows = np.where(batch.computed > 0, tables.block_ids[np.arange(len(before)), before] + 1, 0).astype(np.int32)
    for request, row in batch.state_reads.items():
        rows[request] = row + 1
    return rows


def delta_inputs(batch: StepBatch, all_inputs: Mapping[str, Int32s], beside: Ints) -> dict[str, Int32s | Ints]:
    """`DELTA_INPUTS` of a batch without the requests `beside`; `all_inputs`: `STATE_INPUTS`.

    The operation computes what lies between one begin and the next, so requests that stand together are put behind
    those that follow in the batch: from the end of the last to the begin of the next one there is nothing to compute.
    """
    if not len(beside):
        return {_ALONE + name: values for name, values in all_inputs.items()} | {_ALONE + _SEQUENCES: batch.begins}
    alone = np.delete(np.arange(len(batch.scheduled)), beside)
    runs = np.split(alone, np.flatnonzero(np.diff(alone) > 1) + 1)[::-1] if len(alone) else []
    begins = [batch.begins[[*run, run[-1] + 1]] for run in runs]
    order = np.concatenate([NO_INTS, *(np.append(run, _NOTHING) for run in runs)])[:-1]
    first, last = all_inputs[_BEGINS][:-1], all_inputs[_BEGINS][1:]
    rows = [np.zeros(1, np.int32) if i == _NOTHING else all_inputs[_INDICES][first[i] : last[i]] for i in order]
    return {
        _ALONE + _SEQUENCES: np.concatenate(begins) if begins else np.zeros(1, np.int64),
        _ALONE + _INDICES: np.concatenate([NO_TOKENS, *rows]),
        _ALONE + _BEGINS: np.cumsum([0, *map(len, rows)]),
        _ALONE + _PAST: all_inputs[_PAST][order],
        _ALONE + _INTERVAL: all_inputs[_INTERVAL][order],
    }


_NOTHING = -1
"""In the place of a request: a sequence that ends before it begins. It has to have a row."""
