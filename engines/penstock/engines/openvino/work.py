"""What a step reads and computes, counted in the graph that is compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import openvino as ov

from penstock.engines.contract.model_info import ModelWork
from penstock.engines.kit.cache_size import LayerGroup
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.device import ThreadPlan

_BITS = {"bf16": 16, "f16": 16, "f32": 32}
_FLOATS = (ov.Type.bf16, ov.Type.f16, ov.Type.f32)


class MatrixWork(NamedTuple):
    """As the fields of `ModelWork`."""

    weight_bytes: int
    token_flops: int
    logits_flops: int
    weights: str
    activations: str
    precision: str


def count_matrices(model: ov.Model, precision: str, weights: str, activations: str) -> MatrixWork:
    """Of all products with constant matrices. The plugin keeps floats in the precision of the computation where that is
    smaller than what the file has."""
    behind_choice = _nodes_behind(_parameter(model, "sampled_tokens_indices"))
    weight_bytes = token_flops = logits_flops = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        constants = _constants(node.input_value(1).get_node())
        if constants is None:
            continue
        weight_bytes += sum(_kept_bytes(constant, precision) for constant in constants)
        flops = 2 * math.prod(node.input_value(1).get_shape())
        if node.get_name() in behind_choice:
            logits_flops += flops
        else:
            token_flops += flops
    return MatrixWork(weight_bytes, token_flops, logits_flops, weights, activations, precision)


def model_work(
    matrices: MatrixWork,
    spec: DecoderSpec,
    groups: Sequence[LayerGroup],
    token_bytes: float,
    plans: Sequence[ThreadPlan],
) -> ModelWork | None:
    """`token_bytes`: keys and values of one token in the layers of the largest group. None: the model has experts, and
    what a step reads and computes depends on its tokens."""
    if spec.experts is not None:
        return None
    most_layers = max(len(group.layers) for group in groups)
    return ModelWork(
        **matrices._asdict(),
        kv_bytes=tuple(round(token_bytes * len(group.layers) / most_layers) for group in groups),
        attention_flops=tuple(4 * spec.num_heads * spec.head_dim * len(group.layers) for group in groups),
        threads=tuple((plan.min_tokens, plan.threads) for plan in plans),
    )


def _kept_bytes(constant: Any, precision: str) -> int:
    kind, count = constant.get_element_type(), math.prod(constant.get_output_shape(0))
    bits = min(kind.bitwidth, _BITS[precision]) if kind in _FLOATS else kind.bitwidth
    return -(-int(count) * int(bits) // 8)


def _constants(node: Any) -> list[Any] | None:
    """Those that a matrix is made of; None: it is not constant."""
    found, left, seen = [], [node], set()
    while left:
        one = left.pop()
        if one.get_name() in seen:
            continue
        seen.add(one.get_name())
        kind = one.get_type_name()
        if kind == "Parameter":
            return None
        if kind == "Constant":
            found.append(one)
        left += [value.get_node() for value in one.input_values()]
    return [one for one in found if one.get_element_type() not in (ov.Type.i32, ov.Type.i64)]  # those are shapes


def _nodes_behind(node: Any) -> set[str]:
    """Names of all nodes whose values depend on this one."""
    found, left = {node.get_name()}, [node]
    while left:
        for output in left.pop().outputs():
            for target in output.get_target_inputs():
                following = target.get_node()
                if following.get_name() not in found:
                    found.add(following.get_name())
                    left.append(following)
    return found


def _parameter(model: ov.Model, name: str) -> Any:
    return next(one for one in model.get_parameters() if name in one.output(0).get_names())
