"""Whether the plugin computes attention as it should on this machine.

OpenVINO 2026.4 says that it computes in f16 on every CPU with AVX512-FP16. On one without AMX-FP16 (Sapphire Rapids),
attention of several tokens of a request, as in every prompt, gave zeros, NaN, or what the memory held before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder_inputs import GROUP_INPUTS
from penstock.engines.openvino.device import ThreadPlan, compile_decoder
from penstock.engines.openvino.kv_types import KVType
from penstock.engines.openvino.paged_attention import paged_attention
from penstock.engines.openvino.weights import Node

_TOKENS, _HEAD_SIZE = 40, 64
_CACHES = ("key_cache", "value_cache")
_TOLERANCE = 0.05
"""f16 is off by 0.0005, bf16 by 0.01; what is wrong is off by more than 1, the size of the values."""

Floats = npt.NDArray[np.float32]


def check_attention(
    core: ov.Core, config: OpenVINOConfig, precision: str, kv_type: KVType, *, experts: bool = False
) -> None:
    """Computes one prompt. Raises UnsupportedError where the result is wrong. `experts`: the model has some, see
    `compile_decoder`, which sets the size of the process's caches the first time."""
    query, key, value = np.random.default_rng(0).standard_normal((3, _TOKENS, _HEAD_SIZE), np.float32)
    # Keys and values have two levels, which a cache of few bits keeps exactly.
    key, value = np.where(key > 0, np.float32(1), np.float32(-0.5)), np.where(value > 0, np.float32(1), np.float32(-1))
    compiled = compile_decoder(core, _model(), config, precision, kv_type, ThreadPlan(1, 0), None, experts)
    off = np.abs(_computed(compiled, {"q": query, "k": key, "v": value}) - _attention(query, key, value)).max()
    if not off < _TOLERANCE:  # NaN is wrong, too
        raise UnsupportedError(
            f"dtype={precision}: OpenVINO {ov.get_version().partition('-')[0]} computes the attention of prompts wrong "
            f"in {precision} on this machine; use another dtype",
            param="dtype",
        )


def _attention(query: Floats, key: Floats, value: Floats) -> Floats:
    scores = query @ key.T * np.float32(_HEAD_SIZE**-0.5)
    scores[np.triu_indices(_TOKENS, 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Floats = shares @ value / shares.sum(axis=1, keepdims=True)
    return found


def _computed(compiled: Any, qkv: dict[str, Floats]) -> Floats:
    request = compiled.create_infer_request()
    blocks = range(_TOKENS)  # more than there are, whatever the size of one
    for port in compiled.inputs:
        if port.any_name in _CACHES:
            block = [axis.get_length() for axis in list(port.partial_shape)[1:]]
            request.set_tensor(port.any_name, ov.Tensor(port.element_type, ov.Shape([len(blocks), *block])))
    ints = {"past_lens": [0], "subsequence_begins": [0, _TOKENS], "max_context_len": _TOKENS}
    ints |= {"block_indices": list(blocks), "block_indices_begins": [0, len(blocks)]}
    request.infer(qkv | {name: np.array(each, np.int32) for name, each in ints.items()})
    found: Floats = request.get_output_tensor(0).data.copy()
    return found


def _model() -> ov.Model:
    """Paged attention alone, of one head."""
    floats = [_parameter(name, np.float32, [-1, _HEAD_SIZE]) for name in ("q", "k", "v")]
    caches = [_parameter(name, ov.Type.dynamic, [-1] * 4) for name in _CACHES]
    inputs = {name: _parameter(name, *kind) for name, kind in GROUP_INPUTS.items()}
    inputs["subsequence_begins"] = _parameter("subsequence_begins", np.int32, [-1])
    result = paged_attention(floats, caches, inputs, kv_heads=1, head_size=_HEAD_SIZE, scale=_HEAD_SIZE**-0.5)
    return ov.Model([ops.result(result)], [*floats, *caches, *inputs.values()], "attention")


def _parameter(name: str, dtype: object, shape: list[int]) -> Node:
    node = ops.parameter(ov.PartialShape(shape), dtype, name=name)
    node.output(0).set_names({name})
    return node
