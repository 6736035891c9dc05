"""Gated delta nets of prompts, without the operation that pages their states: that one takes several times as long.

That operation copies queries and keys element by element, again for each value of each head. The one without rows does
not, so longer runs of tokens go through it, as a batch that is filled up to the longest one. It gives the state behind
a run only: a request with a checkpoint within its tokens is in the batch once for each state to keep. The graph cannot
write rows of a table by ordinary operations, so kept states are outputs, and `StateTables` puts them into their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino.opset15 as ops

from penstock.engines.kit.batch import GroupTables, Int32s, Ints, StepBatch, row_ends
from penstock.engines.openvino.decoder_inputs import Input
from penstock.engines.openvino.graph_nodes import Node, i64
from penstock.engines.openvino.recurrent import delta_loop, rows_before

_LEAST_TOKENS = 8
"""Of a request in a step: for fewer there is too much beside them."""
_GAIN = 3
"""How many tokens that fill up the batch take no longer than one token of the operation with rows, at least."""
_MOST_RUNS = 8
"""In a step: each takes memory for its state in each layer."""

_TOKENS, _LIVE, _LENGTH, _ROWS = "prompts.tokens", "prompts.live", "prompts.length", "prompts.rows"
_PLACES, _TARGETS = "prompts.places", "prompts.targets"
PROMPT_INPUTS: dict[str, Input] = {
    _TOKENS: (np.int64, [-1]),
    _LIVE: (np.float32, [-1]),
    _LENGTH: (np.int64, []),
    _ROWS: (np.int64, [-1]),
    _PLACES: (np.int64, [-1]),
    _TARGETS: (np.int64, [-1]),
}
"""For R runs of up to L tokens: tokens [R * L], of the step; live [R * L], 0: the run is shorter; length []: L; rows
[R], which they start from. places: those of the R * L that give an output, and targets: of which tokens."""


def prompt_delta_net(
    y: Node,
    qkv: tuple[Node, Node, Node],
    table: Node,
    decay: Node,
    beta: Node,
    sizes: tuple[int, int, int, int],
    inputs: Mapping[str, Node],
) -> tuple[Node, Node]:
    """`y` [T, value heads, value size] with the tokens of runs put into it, and the states behind these [R, value
    heads, value size, key size]. Operands as `paged_delta_net` has them; `sizes`: heads of
    keys and of values, and of one of each."""
    key_heads, heads, key_dim, value_dim = sizes
    length, runs = ops.unsqueeze(inputs[_LENGTH], i64([0])), i64([-1])
    tokens = ops.reshape(inputs[_TOKENS], ops.concat([runs, length], 0), False)
    live = ops.reshape(inputs[_LIVE], ops.concat([runs, length, i64([1])], 0), False)
    q, k, v, decay, beta = (ops.gather(x, tokens, i64(0)) for x in (*qkv, decay, beta))
    if heads != key_heads:
        owners = i64(np.repeat(np.arange(key_heads), heads // key_heads))
        q, k = (ops.gather(x, owners, i64(2)) for x in (q, k))
    heads_first, turned = i64([0, 2, 1, 3]), i64([0, 1, 3, 2])
    q, k, v = (ops.transpose(x, heads_first) for x in (q, k, v))
    decay, beta = (ops.transpose(ops.multiply(x, live), i64([0, 2, 1])) for x in (decay, beta))
    before = ops.convert(ops.gather(table, inputs[_ROWS], i64(0)), "f32")
    outputs, states = delta_loop(
        (q, k, v, decay, beta), ops.transpose(before, turned), (heads, key_dim, value_dim), length
    )
    outputs = ops.reshape(ops.transpose(outputs, heads_first), i64([-1, heads, value_dim]), False)
    y = ops.scatter_update(y, inputs[_TARGETS], ops.gather(outputs, inputs[_PLACES], i64(0)), i64(0))
    return y, ops.transpose(states, turned)


def takes_runs(compiled: Any) -> bool:
    """The model has `PROMPT_INPUTS`: exported ones with delta nets do not."""
    return any(port.any_name == _TOKENS for port in compiled.inputs)


def requests_in_runs(batch: StepBatch, tables: GroupTables, block_size: int) -> Ints:
    """Of a step: those that this is faster for. `tables`: of rows, as the contract has them."""
    num_tokens, num_kept = batch.scheduled, np.ones_like(batch.scheduled)
    fits = num_tokens >= _LEAST_TOKENS
    fits[list(batch.state_writes)] = False  # each of their tokens leaves a state
    for request in np.flatnonzero(fits).tolist():
        num_kept[request] = len(_ends(batch, tables, block_size, request))
    fits &= num_kept <= _GAIN
    longest = int(num_tokens[fits].max(initial=0))
    chosen = np.flatnonzero(fits & (num_kept * longest <= _GAIN * num_tokens))
    chosen = chosen[np.argsort(-num_tokens[chosen], kind="stable")]
    return np.sort(chosen[np.cumsum(num_kept[chosen]) <= _MOST_RUNS])


def prompt_inputs(
    batch: StepBatch, tables: GroupTables, block_size: int, requests: Ints
) -> tuple[dict[str, Any], Int32s]:
    """`PROMPT_INPUTS` of these requests, and into which rows the states go."""
    before = rows_before(batch, tables, block_size).tolist()
    runs = [run for request in requests.tolist() for run in _runs(batch, tables, block_size, request, before[request])]
    begins, counts, read, written, is_last = np.array(runs, np.int64).reshape(-1, 5).T
    entries = np.arange(counts.max(initial=1))
    tokens, live = begins[:, None] + entries, entries < counts[:, None]
    places = np.flatnonzero(live & (is_last[:, None] > 0))
    inputs = {
        _TOKENS: np.where(live, tokens, begins[:, None]).ravel(),
        _LIVE: live.ravel().astype(np.float32),
        _LENGTH: len(entries),
        _ROWS: read,
        _PLACES: places,
        _TARGETS: tokens.ravel()[places],
    }
    return inputs, written.astype(np.int32)


def _ends(batch: StepBatch, tables: GroupTables, block_size: int, request: int) -> list[int]:
    computed = int(batch.computed[request])
    return row_ends(tables.block_ids[request], computed, computed + int(batch.scheduled[request]), block_size)


def _runs(
    batch: StepBatch, tables: GroupTables, block_size: int, request: int, read: int
) -> list[tuple[int, int, int, int, bool]]:
    """First token of the step, how many, row to read and to write, whether it is all that the request has. `read`: the
    row that the request goes on from."""
    begin, computed, rows = int(batch.begins[request]), int(batch.computed[request]), tables.block_ids[request]
    ends = _ends(batch, tables, block_size, request)
    return [(begin, end - computed, read, int(rows[(end - 1) // block_size]) + 1, end == ends[-1]) for end in ends]
