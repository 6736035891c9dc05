"""How fast this machine multiplies matrices, in the way in which the decoder's are multiplied."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ModelWork
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import QUANTIZED, WeightsType
from penstock.engines.openvino.device import compile_encoder
from penstock.engines.openvino.numerics import Dtype, Numerics
from penstock.engines.openvino.weights import Weights

_NAME = "matrix"
_SIZE, _ROWS, _PRODUCTS = 2048, 1024, 4
"""Of the matrix, of what is multiplied by it, and how many products follow each other: 34 GFLOP."""


def product_speeds(
    work: ModelWork, threads: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """FLOPs per second of large products with weights and activations of the types of `work`."""
    numerics = Numerics(
        dtype=cast(Dtype, work.precision),
        activations=work.activations,
        kv=None,
        integers=work.weights in QUANTIZED,
    )
    request = _compile(numerics, cast(WeightsType, work.weights), threads).create_infer_request()
    request.set_input_tensor(ov.Tensor(np.random.default_rng(1).standard_normal((_ROWS, _SIZE), np.float32)))
    flops = 2 * _ROWS * _SIZE * _SIZE * _PRODUCTS
    request.infer()
    return [flops / _seconds(request, clock) for _ in range(repeats)]


def _compile(numerics: Numerics, kept: WeightsType, threads: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        _write_matrix(Path(folder) / "model.safetensors")
        weights = Weights(Checkpoint(Path(folder)), kept)
        given = ops.parameter([_ROWS, _SIZE], np.float32)
        x: Any = given
        for _ in range(_PRODUCTS):
            x = weights.project(x, _NAME, (_SIZE, _SIZE))
        model = ov.Model([ops.result(x)], [given], "products")
        return compile_encoder(ov.Core(), model, numerics, threads)


def _write_matrix(path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((_SIZE, _SIZE), np.float32) / np.float32(_SIZE**0.5)
    entry = {"dtype": "F32", "shape": values.shape, "data_offsets": [0, values.nbytes]}
    head = json.dumps({_NAME: entry}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + values.tobytes())


def _seconds(request: Any, clock: Callable[[], float]) -> float:
    started = clock()
    request.infer()
    return max(clock() - started, 1e-9)
