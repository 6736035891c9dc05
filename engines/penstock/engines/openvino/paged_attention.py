"""The plugin's paged attention as a node of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import openvino.opset15 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from penstock.engines.openvino.graph_nodes import f32, i32
from penstock.engines.openvino.weights import Node


def paged_attention(
    qkv: Sequence[Node],
    caches: Sequence[Node],
    inputs: Mapping[str, Node],
    *,
    kv_heads: int,
    head_size: int,
    scale: float,
    window: int = 0,
    slopes: Sequence[float] = (),
    sinks: Node | None = None,
) -> Node:
    """[T, heads * head_size], as are the queries; keys and values are [T, kv_heads * head_size]. `caches`: of keys and
    of values. `inputs`: `decoder_inputs.GROUP_INPUTS` and subsequence_begins. `window`: tokens that a token sees, with
    itself; 0: all before it. `slopes` of ALiBi, and `sinks` [1, heads, 1, 1], for each head; none by default."""
    ints, floats = i32([]), f32([])
    operands = [*qkv, *caches, inputs["past_lens"], inputs["subsequence_begins"]]
    operands += [inputs["block_indices"], inputs["block_indices_begins"], f32(scale), i32(window)]
    operands += [f32(slopes), inputs["max_context_len"]]
    # The op's optional parts, most of them empty: score aggregation, cache rotation, xattention, eviction ...
    operands += [ints, ints, ints, floats, floats, i32(0), i32(0)]
    operands += [f32(np.zeros((0, 0, 0, 0))) if sinks is None else sinks]
    operands += [i32(0), ints, ints, ints, ints, ops.constant(np.zeros(0, np.uint8)), ints]
    attention = PagedAttention([operand.output(0) for operand in operands])
    for kind in ("k", "v"):
        attention.get_rt_info()[f"num_{kind}_heads"] = kv_heads
        attention.get_rt_info()[f"{kind}_head_size"] = head_size
    return attention.output(0)
