"""bfloat16 tensors as ONNX Runtime takes and gives them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from penstock.classic.onnxruntime.library import load_onnxruntime
from penstock.classic.tensors import NUMPY_TYPES, Array

_ONNX_BFLOAT16 = 16
"""TensorProto.BFLOAT16."""


def to_value(array: Array) -> Any:
    """An OrtValue over the array's memory, which must outlive it; numpy's own arrays know no bfloat16."""
    value = load_onnxruntime().OrtValue
    if array.dtype == NUMPY_TYPES["BF16"]:
        return value.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)
    return value.ortvalue_from_numpy(array)


def from_value(value: Any) -> Array:
    """A copy of an OrtValue in the CPU's memory."""
    if value.data_type() != "tensor(bfloat16)":
        found: Array = value.numpy()
        return found
    array = np.empty(value.shape(), NUMPY_TYPES["BF16"])
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array
