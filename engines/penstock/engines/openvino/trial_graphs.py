"""Tiny graphs with the operations of a model: do they compute on this machine as they should?

OpenVINO says that it computes in bf16 and f16 on CPUs where its attention then raises an error, leaves its working
memory in a state in which the next graph crashes the process, or (2026.4, f16 without AMX-FP16, as on Sapphire Rapids)
gives zeros, NaN, or what the memory held before. So these graphs are computed in a process of their own (`trials`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.openvino.attention import paged_attention
from penstock.engines.openvino.decoder_inputs import GROUP_INPUTS
from penstock.engines.openvino.decoder_spec import Attention
from penstock.engines.openvino.graph_nodes import Node
from penstock.engines.openvino.numerics import KVType
from penstock.engines.openvino.quantization import GROUP

_DEVICE = "CPU"
_TOKENS, _HEAD_SIZE = 40, 64
_CACHES = ("key_cache", "value_cache")
_TOLERANCE = 0.05
"""f16 is off by 0.0005, bf16 by 0.01; what is wrong is off by more than 1, the size of the values."""
_ROWS, _WIDTH, _FEW_TOKENS = 64, 2 * GROUP, 2
_SCALE = np.float32(0.01)

Floats = npt.NDArray[np.float32]


def attention_fault(dtype: str, kv_type: KVType) -> str:
    """What is wrong with the attention of one prompt, whose queries come from a product; empty: nothing is. Raises
    RuntimeError as the plugin does."""
    hidden, key, value = np.random.default_rng(0).standard_normal((3, _TOKENS, _HEAD_SIZE), np.float32)
    # Keys and values have two levels, which a cache of few bits keeps exactly.
    key, value = np.where(key > 0, np.float32(1), np.float32(-0.5)), np.where(value > 0, np.float32(1), np.float32(-1))
    matrix = _orthogonal(_HEAD_SIZE)
    compiled = _compiled(_attention_model(matrix), dtype, kv_type.properties)
    result = _attention_result(compiled, {"x": hidden, "k": key, "v": value})
    expected = _attention(hidden @ matrix.T, key, value)
    if result.shape == expected.shape and np.abs(result - expected).max() < _TOLERANCE:  # NaN is wrong, too
        return ""
    return f"OpenVINO {_version()} computes the attention of prompts wrong in {dtype} on this machine"


def product_fault(dtype: str) -> str:
    """What is wrong with a product of floats; empty: nothing is. Raises RuntimeError as the plugin does."""
    rows = np.random.default_rng(0).standard_normal((_TOKENS, _HEAD_SIZE), np.float32)
    matrix = _orthogonal(_HEAD_SIZE)
    x = ops.parameter([-1, _HEAD_SIZE], np.float32)
    model = ov.Model([ops.matmul(x, ops.constant(matrix), False, True)], [x])
    result = np.array(_compiled(model, dtype, {})([rows])[0], np.float32)
    if result.shape == rows.shape and np.abs(result - rows @ matrix.T).max() < _TOLERANCE:
        return ""
    return f"OpenVINO {_version()} computes products wrong in {dtype} on this machine"


def rounding_fault(dtype: str) -> str:
    """Empty: the plugin multiplies weights in 8 and 4 bits with activations that it rounds to int8, as it is asked to.
    Where a CPU computes in bf16, it (2026.4) may unpack the weights to bf16 instead, and reports nothing."""
    rows = np.random.default_rng(0).standard_normal((_FEW_TOKENS, _WIDTH), np.float32)
    matrix = np.random.default_rng(1).integers(-127, 128, (_ROWS, _WIDTH), np.int8)
    exact, rounded = (_integer_product(dtype, group, rows, matrix) for group in (0, GROUP))
    if np.array_equal(rounded, exact):
        return f"OpenVINO {_version()} does not round activations in {dtype}"
    expected = rows @ matrix.T * _SCALE
    if rounded.shape == expected.shape and np.abs(rounded - expected).max() < _TOLERANCE * np.abs(expected).max():
        return ""
    return f"OpenVINO {_version()} computes products with activations in int8 wrong in {dtype} on this machine"


def _integer_product(dtype: str, group: int, rows: Floats, matrix: npt.NDArray[np.int8]) -> Floats:
    """`group`: activations that share a scale; 0: they stay floats."""
    x = ops.parameter([-1, _WIDTH], np.float32)
    scaled = ops.multiply(ops.convert(ops.constant(matrix), "f32"), ops.constant(np.full((_ROWS, 1), _SCALE)))
    model = ov.Model([ops.matmul(x, scaled, False, True)], [x])
    return np.array(_compiled(model, dtype, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group})([rows])[0], np.float32)


def _attention(query: Floats, key: Floats, value: Floats) -> Floats:
    scores = query @ key.T * np.float32(_HEAD_SIZE**-0.5)
    scores[np.triu_indices(_TOKENS, 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    weighted: Floats = shares @ value / shares.sum(axis=1, keepdims=True)
    return weighted


def _attention_result(compiled: Any, floats: dict[str, Floats]) -> Floats:
    request = compiled.create_infer_request()
    blocks = range(_TOKENS)  # more than there are, whatever the size of one
    for port in compiled.inputs:
        if port.any_name in _CACHES:
            block = [axis.get_length() for axis in list(port.partial_shape)[1:]]
            request.set_tensor(port.any_name, ov.Tensor(port.element_type, ov.Shape([len(blocks), *block])))
    ints = {"past_lens": [0], "subsequence_begins": [0, _TOKENS], "max_context_len": _TOKENS}
    ints |= {"block_indices": list(blocks), "block_indices_begins": [0, len(blocks)]}
    request.infer(floats | {name: np.array(values, np.int32) for name, values in ints.items()})
    result: Floats = request.get_output_tensor(0).data.copy()
    return result


def _attention_model(matrix: Floats) -> ov.Model:
    """Paged attention of one head."""
    x, *keys_and_values = (_parameter(name, np.float32, [-1, _HEAD_SIZE]) for name in ("x", "k", "v"))
    caches = [_parameter(name, ov.Type.dynamic, [-1] * 4) for name in _CACHES]
    inputs = {name: _parameter(name, *kind) for name, kind in GROUP_INPUTS.items()}
    inputs["subsequence_begins"] = _parameter("subsequence_begins", np.int32, [-1])
    qkv = [ops.matmul(x, ops.constant(matrix), False, True), *keys_and_values]
    result = paged_attention(qkv, caches, inputs, Attention(1, 1, _HEAD_SIZE, _HEAD_SIZE**-0.5, rope=None))
    return ov.Model([ops.result(result)], [x, *keys_and_values, *caches, *inputs.values()], "attention")


def _parameter(name: str, dtype: object, shape: list[int]) -> Node:
    node = ops.parameter(ov.PartialShape(shape), dtype, name=name)
    node.output(0).set_names({name})
    return node


def _orthogonal(size: int) -> Floats:
    """A matrix that keeps the size of what it is multiplied with."""
    return np.linalg.qr(np.random.default_rng(2).standard_normal((size, size)))[0].astype(np.float32)


def _compiled(model: ov.Model, dtype: str, properties: dict[str, Any]) -> Any:
    common = {"INFERENCE_PRECISION_HINT": dtype, "INFERENCE_NUM_THREADS": 1}
    return ov.Core().compile_model(model, _DEVICE, common | properties)


def _version() -> str:
    return str(ov.get_version()).partition("-")[0]
