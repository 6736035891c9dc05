"""Requests of tritonclient, over HTTP or gRPC."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype


def infer_inputs(module: Any, **arrays: np.ndarray[Any, Any]) -> list[Any]:
    """`module` is tritonclient.http or tritonclient.grpc."""
    made = []
    for name, array in arrays.items():
        made.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made
