"""Paged attention in a graph: the plugin's, and around it one whose scores are capped, as Gemma 2 has it.

The plugin's paged attention cannot cap scores. For that it still writes keys and values into the cache; its result is
thrown away, and plain operations compute attention from the cache, in a loop over tiles: some queries of one request.
Block tables, windows, prefix hits and offload are those of any other layer. Keys and values have to be floats, and the
computation f32: the plain operations would round scores to bf16, which is off by 0.125 at 50.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from penstock.engines.openvino.decoder_spec import Attention
from penstock.engines.openvino.graph_nodes import Node, f32, i32, i64, scaled


def paged_attention(
    qkv: Sequence[Node],
    caches: Sequence[Node],
    inputs: Mapping[str, Node],
    layer: Attention,
    sinks: Node | None = None,
    kinds: Node | None = None,
) -> Node:
    """[T, heads * head_size], as are the queries; keys and values are [T, kv_heads * head_size]. `caches`: of keys and
    of values. `inputs`: `decoder_inputs.GROUP_INPUTS` and subsequence_begins. `sinks` [1, heads, 1, 1].
    `kinds` [T] i32: tokens with a 1 that stand side by side attend to each other in both directions, as far as they are
    in one step."""
    ints, floats = i32([]), f32([])
    operands = [*qkv, *caches, inputs["past_lens"], inputs["subsequence_begins"]]
    operands += [inputs["block_indices"], inputs["block_indices_begins"], f32(layer.scale), i32(layer.window)]
    operands += [f32(_alibi_slopes(layer.num_heads) if layer.alibi else []), inputs["max_context_len"]]
    # The op's optional parts, most of them empty: score aggregation, cache rotation, xattention, eviction ...
    operands += [ints, ints, ints, floats, floats, i32(0), i32(0)]
    operands += [f32(np.zeros((0, 0, 0, 0))) if sinks is None else sinks]
    operands += [i32(0), ints, ints, ints, ints if kinds is None else kinds]
    operands += [ops.constant(np.zeros(0, np.uint8)), ints]
    node = PagedAttention([operand.output(0) for operand in operands])
    for kind in ("k", "v"):
        node.get_rt_info()[f"num_{kind}_heads"] = layer.num_kv_heads
        node.get_rt_info()[f"{kind}_head_size"] = layer.head_dim
    result = node.output(0)
    return _capped_attention(result, qkv[0], caches, inputs, layer) if layer.score_cap else result


def _alibi_slopes(heads: int) -> list[float]:
    """By which a head's scores fall with each token of distance. Powers of one number; with a number of heads that is
    no power of two, the rest comes from the powers for twice as many heads, every other one."""
    whole = 1 << (heads.bit_length() - 1)
    rest = _powers(2 * whole)[::2][: heads - whole]
    return _powers(whole) + rest


def _powers(heads: int) -> list[float]:
    base = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
    return [base**n for n in range(1, heads + 1)]


_TILE = 64
"""Queries that are computed together. It bounds the memory for scores: heads * 64 * context floats."""
_TABLES = ("past_lens", "subsequence_begins", "block_indices_begins")


def _capped_attention(
    written: Node, q: Node, caches: Sequence[Node], inputs: Mapping[str, Node], shape: Attention
) -> Node:
    """[T, heads * head_size]. `written`: the result of paged attention over the same tokens; `q`, `caches`, `inputs`:
    as it has them."""
    begins = inputs["subsequence_begins"]
    tiles = ops.divide(ops.add(ops.subtract(_without_first(begins), _without_last(begins)), i32(_TILE - 1)), i32(_TILE))
    # Paged attention has to write the caches first: so the blocks that are read depend on the shape of its result.
    nothing = ops.multiply(ops.gather(ops.shape_of(written, "i32"), i64([0]), i64(0)), i32(0))
    blocks = ops.add(inputs["block_indices"], nothing)
    outer = {name: inputs[name] for name in _TABLES}
    outer |= {"q": scaled(q, shape.scale / shape.score_cap), "tiles": tiles, "tile_ends": ops.cum_sum(tiles, i32(0))}
    # The loop copies what it is given: so it gets the blocks of this step, not the whole caches.
    outer |= {name: ops.gather(cache, blocks, i64(0)) for name, cache in zip(("keys", "values"), caches, strict=True)}
    inner = {name: _parameter_like(node) for name, node in outer.items()}
    number, done = ops.parameter([], np.int32), _parameter_like(written)
    places, rows = _tile(number, inner, shape)
    done_more = ops.scatter_update(done, places, rows, i64(0))
    goes_on = ops.constant(np.array(True))
    body = ov.Model([ops.result(done_more), ops.result(goes_on)], [number, *inner.values(), done], "tile")
    loop = ops.loop(ops.reduce_sum(tiles, i64([0]), False), ops.constant(np.array(True)))
    loop.set_function(body)
    loop.set_special_body_ports([0, 1])
    for name, node in outer.items():
        loop.set_invariant_input(inner[name], _output(node))
    loop.set_merged_input(done, written, done_more.output(0))
    return loop.get_iter_value(done_more.output(0), -1)


def _tile(number: Node, inputs: Mapping[str, Node], shape: Attention) -> tuple[Node, Node]:
    """Which of the step's tokens the tile has, and their attention [n, heads * head_size]."""
    ends = inputs["tile_ends"]
    request = ops.reduce_sum(ops.convert(ops.less_equal(ends, number), "i32"), i64([0]), False)
    following = ops.add(request, i32(1))
    tiles_before = ops.subtract(_at(ends, request), _at(inputs["tiles"], request))
    first, last = (_at(inputs["subsequence_begins"], place) for place in (request, following))
    begin = ops.add(first, ops.multiply(ops.subtract(number, tiles_before), i32(_TILE)))
    places = ops.range(begin, ops.minimum(ops.add(begin, i32(_TILE)), last), i32(1), "i32")
    past = ops.subtract(_at(inputs["past_lens"], request), first)
    num_keys = ops.add(past, last)
    bounds = [_at(inputs["block_indices_begins"], place) for place in (request, following)]
    begin_block, end_block = (ops.unsqueeze(bound, i64(0)) for bound in bounds)
    own = [ops.slice(inputs[name], begin_block, end_block, i32([1]), i32([0])) for name in ("keys", "values")]
    keys, values = (_by_head(blocks, num_keys, shape) for blocks in own)
    group, d = shape.num_heads // shape.num_kv_heads, shape.head_dim
    q = ops.reshape(ops.gather(inputs["q"], places, i64(0)), i64([0, shape.num_kv_heads, group, d]), True)
    q = ops.reshape(ops.transpose(q, i64([1, 2, 0, 3])), i64([shape.num_kv_heads, -1, d]), False)
    scores = ops.multiply(ops.tanh(ops.matmul(q, keys, False, True)), f32(shape.score_cap))
    sees = _mask(ops.add(places, past), ops.range(i32(0), num_keys, i32(1), "i32"), shape.window)
    length = ops.unsqueeze(num_keys, i64(0))
    by_query = ops.concat([i32([shape.num_kv_heads, group, -1]), length], 0)
    scores = ops.select(sees, ops.reshape(scores, by_query, False), f32(np.finfo(np.float32).min))
    shares = ops.reshape(ops.softmax(scores, -1), ops.concat([i32([shape.num_kv_heads, -1]), length], 0), False)
    y = ops.reshape(ops.matmul(shares, values, False, False), i64([shape.num_heads, -1, d]), False)
    return places, ops.reshape(ops.transpose(y, i64([1, 0, 2])), i64([-1, shape.num_heads * d]), False)


def _mask(queries: Node, keys: Node, window: int) -> Node:
    """[queries, keys]: whether one sees the other, by their positions."""
    distance = ops.subtract(ops.unsqueeze(queries, i64(1)), ops.unsqueeze(keys, i64(0)))
    sees = ops.greater_equal(distance, i32(0))
    return ops.logical_and(sees, ops.less(distance, i32(window))) if window else sees


def _by_head(blocks: Node, num_keys: Node, shape: Attention) -> Node:
    """[blocks, kv_heads, tokens, head_size] of the cache as [kv_heads, num_keys, head_size] f32. What lies behind the
    newest token in a block may be anything, also NaN."""
    y = ops.transpose(blocks, i64([1, 0, 2, 3]))
    y = ops.reshape(y, i64([shape.num_kv_heads, -1, shape.head_dim]), False)
    y = ops.slice(y, i32([0]), ops.unsqueeze(num_keys, i64(0)), i32([1]), i32([1]))
    return ops.convert(y, "f32")


def _at(numbers: Node, place: Node) -> Node:
    return ops.gather(numbers, place, i64(0))


def _without_first(numbers: Node) -> Node:
    return ops.slice(numbers, i64([1]), i64([np.iinfo(np.int64).max]), i64([1]), i64([0]))


def _without_last(numbers: Node) -> Node:
    return ops.slice(numbers, i64([0]), i64([-1]), i64([1]), i64([0]))


def _parameter_like(node: Node) -> Node:
    output = _output(node)
    return ops.parameter(output.get_partial_shape(), output.get_element_type())


def _output(node: Node) -> Node:
    return node if isinstance(node, ov.Output) else node.output(0)
