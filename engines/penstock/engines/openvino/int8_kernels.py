"""Whether the plugin multiplies weights in 8 and 4 bits with activations in int8, as it is asked to."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.openvino.quantization import GROUP

_ROWS, _WIDTH, _TOKENS = 64, 2 * GROUP, 2


@cache
def rounds_activations(device: str, precision: str) -> bool:
    """Found out with a small matrix, in some 20 ms. The kernels for int8 take f32 alone: where a CPU computes in bf16,
    the plugin (2026.4) may unpack the weights to bf16 instead, and says nothing of it."""
    given = np.random.default_rng(0).standard_normal((_TOKENS, _WIDTH), np.float32)
    rounded, exact = (_product(device, precision, group, given) for group in (GROUP, 0))
    return not np.array_equal(rounded, exact)


def _product(device: str, precision: str, group: int, given: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    matrix = np.random.default_rng(1).integers(-127, 128, (_ROWS, _WIDTH), np.int8)
    x = ops.parameter([-1, _WIDTH], np.float32)
    scaled = ops.multiply(ops.convert(ops.constant(matrix), "f32"), ops.constant(np.full((_ROWS, 1), 0.01, np.float32)))
    model = ov.Model([ops.matmul(x, scaled, False, True)], [x])
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": 1,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }
    compiled = ov.Core().compile_model(model, device, properties)
    return np.array(compiled([given])[0], np.float32)
