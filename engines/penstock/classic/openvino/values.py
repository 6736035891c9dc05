"""Tensors as OpenVINO takes and gives them, where they differ from ours: text and bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.classic.openvino.library import load_openvino
from penstock.classic.tensors import NUMPY_TYPES, Array
from penstock.engines.errors import InvalidRequestError

_BF16 = NUMPY_TYPES["BF16"]
_MOST_TEXT_BYTES = 256 * 1024 * 1024


def to_tensor(name: str, array: Array) -> Any:
    """An ov.Tensor, over the array's memory where that is possible. Raises InvalidRequestError for text that cannot
    be passed."""
    ov = load_openvino()
    if array.dtype.hasobject:
        return _text_tensor(name, array)
    array = np.asarray(array, order="C")  # a scalar stays one
    if array.dtype == _BF16:
        return ov.Tensor(array.view(np.int16), ov.Shape(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=array.flags.writeable)


def _text_tensor(name: str, array: Array) -> Any:
    """Strings pass through numpy's own, which all have the size of the longest one and end at their last byte."""
    ov = load_openvino()
    items: list[bytes] = array.ravel().tolist()
    if max(map(len, items), default=0) * len(items) > _MOST_TEXT_BYTES:
        raise InvalidRequestError(f"the strings of input '{name}' are too many for the length of its longest one")
    if any(item.endswith(b"\0") for item in items):
        raise InvalidRequestError(f"input '{name}' has a string that ends with a zero byte, which cannot be passed")
    tensor = ov.Tensor(ov.Type.string, ov.Shape(array.shape))
    if items:
        tensor.bytes_data = np.array(items, np.bytes_).reshape(array.shape)
    return tensor


def from_tensor(tensor: Any) -> Array:
    """A copy: the next execution writes to the same memory."""
    kind = tensor.get_element_type().get_type_name()
    if kind == "string":
        return np.asarray(tensor.bytes_data).astype(np.object_)
    if kind == "bf16":
        return np.array(tensor.data.view(np.uint16)).view(_BF16)
    return np.array(tensor.data)
