"""Tensors in the typed fields of InferTensorContents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.classic.tensors import NUMPY_TYPES, Tensor, element_count
from penstock.engines.errors import InvalidRequestError

_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""FP16 and BF16 have no field: they travel as raw contents only."""
_WIRE_TYPES = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def from_contents(name: str, datatype: str, shape: Sequence[int], contents: Any, model: str) -> Tensor:
    """The tensor in `contents`. Raises InvalidRequestError when it is not in the datatype's field, when there are more
    or fewer elements than the shape asks for, and for integers that the datatype cannot hold."""
    field = _FIELDS.get(datatype)
    for descriptor, _ in contents.ListFields():
        if descriptor.name != field:
            shown = datatype if datatype in NUMPY_TYPES else "<invalid>"
            raise InvalidRequestError(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type "
                f"'{_WIRE_TYPES[descriptor.name]}', expected datatype '{shown}'"
            )
    count = element_count(shape, name)
    values = getattr(contents, field) if field is not None else ()
    if field is None or len(values) != count:
        raise InvalidRequestError(
            f"unexpected number of elements {len(values)} for input '{name}' for model '{model}', expecting {count}"
        )
    dtype = NUMPY_TYPES[datatype]
    if datatype == "BYTES":
        array = np.empty(count, np.object_)
        array[:] = values
        return Tensor(name, datatype, array.reshape(shape))
    wide = np.fromiter(values, NUMPY_TYPES[_WIRE_TYPES[field]], count)
    if dtype.itemsize < wide.dtype.itemsize and count:
        limits = np.iinfo(dtype)
        if wide.min() < limits.min or wide.max() > limits.max:
            raise InvalidRequestError(f"input '{name}' has values that {datatype} cannot hold")
    return Tensor(name, datatype, wide.astype(dtype, copy=False).reshape(shape))
