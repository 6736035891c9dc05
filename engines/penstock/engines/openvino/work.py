"""Work of a step, counted in the graph that is compiled; and how fast this machine multiplies such matrices."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ModelWork
from penstock.engines.host.cpu import this_cpu
from penstock.engines.kit.cache_size import LayerGroup
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import QUANTIZED, WeightsType
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.device import ThreadPlan, compile_graph
from penstock.engines.openvino.numerics import Dtype, IntegersType, Numerics, cpu_facts
from penstock.engines.openvino.weights import Weights

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
    stored = max(sum(spec.attention[n].kv_size for n in group.layers) for group in groups)
    readers = [spec.readers(group) for group in groups]
    return ModelWork(
        **matrices._asdict(),
        kv_bytes=tuple(round(token_bytes * sum(layer.kv_size for layer in layers) / stored) for layers in readers),
        attention_flops=tuple(4 * sum(layer.q_size for layer in layers) for layers in readers),
        threads=tuple((plan.min_tokens, plan.threads) for plan in plans),
    )


def _kept_bytes(constant: Any, precision: str) -> int:
    kind, count = constant.get_element_type(), math.prod(constant.get_output_shape(0))
    bits = min(kind.bitwidth, _BITS[precision]) if kind in _FLOATS else kind.bitwidth
    return -(-int(count) * int(bits) // 8)


def _constants(node: Any) -> list[Any] | None:
    """Those that a matrix is made of; None: it is not constant."""
    constants, left, names = [], [node], set()
    while left:
        one = left.pop()
        if one.get_name() in names:
            continue
        names.add(one.get_name())
        kind = one.get_type_name()
        if kind == "Parameter":
            return None
        if kind == "Constant":
            constants.append(one)
        left += [value.get_node() for value in one.input_values()]
    return [one for one in constants if one.get_element_type() not in (ov.Type.i32, ov.Type.i64)]  # those are shapes


def _nodes_behind(node: Any) -> set[str]:
    """Names of all nodes whose values depend on this one."""
    names, left = {node.get_name()}, [node]
    while left:
        for output in left.pop().outputs():
            for target in output.get_target_inputs():
                following = target.get_node()
                if following.get_name() not in names:
                    names.add(following.get_name())
                    left.append(following)
    return names


def _parameter(model: ov.Model, name: str) -> Any:
    return next(one for one in model.get_parameters() if name in one.output(0).get_names())


_NAME = "matrix"
_SIZE, _ROWS, _PRODUCTS = 2048, 1024, 4
"""Of the matrix, of what is multiplied by it, and how many products follow each other: 34 GFLOP."""


def product_speeds(
    work: ModelWork, threads: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """FLOPs per second of large products with weights and activations of the types of `work`."""
    integers = cast(IntegersType, work.weights) if work.weights in QUANTIZED else None
    numerics = Numerics(
        dtype=cast(Dtype, work.precision),
        activations=work.activations,
        kv=None,
        integers=integers,
        unpacks=cpu_facts(this_cpu()).unpacks(integers, work.activations),
    )
    request = _compile(numerics, cast(WeightsType, work.weights), threads).create_infer_request()
    request.set_input_tensor(ov.Tensor(np.random.default_rng(1).standard_normal((_ROWS, _SIZE), np.float32)))
    flops = 2 * _ROWS * _SIZE * _SIZE * _PRODUCTS
    request.infer()
    return [flops / _seconds(request, clock) for _ in range(repeats)]


def _compile(numerics: Numerics, kept: WeightsType, threads: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        _write_matrix(Path(folder) / "model.safetensors")
        weights = Weights(Checkpoint(Path(folder)), kept, unpacks=numerics.unpacks)
        rows = ops.parameter([_ROWS, _SIZE], np.float32)
        x: Any = rows
        for _ in range(_PRODUCTS):
            x = weights.project(x, _NAME, (_SIZE, _SIZE))
        model = ov.Model([ops.result(x)], [rows], "products")
        return compile_graph(ov.Core(), model, numerics, ThreadPlan(threads), has_experts=False)


def _write_matrix(path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((_SIZE, _SIZE), np.float32) / np.float32(_SIZE**0.5)
    entry = {"dtype": "F32", "shape": values.shape, "data_offsets": [0, values.nbytes]}
    head = json.dumps({_NAME: entry}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + values.tobytes())


def _seconds(request: Any, clock: Callable[[], float]) -> float:
    started = clock()
    request.infer()
    return max(clock() - started, 1e-9)
