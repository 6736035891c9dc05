"""Datatypes between the protocol, the configuration and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import TritonModelException
from .wire import NUMPY

_NAMES = {dtype: name for name, dtype in NUMPY.items() if name != "BF16"}

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    **{f"TYPE_{name}": dtype.type for name, dtype in NUMPY.items() if name not in ("BOOL", "BF16")},
    "TYPE_STRING": np.object_,
}
"""Triton's table: Python's bool for TYPE_BOOL, numpy's scalar types otherwise."""

_NUMBERED = [None, np.bool_, *list(TRITON_STRING_TO_NUMPY.values())[1:]]


def datatype_of(dtype: np.dtype[Any]) -> str:
    """`FP32` for float32. Raises TritonModelException for what has no datatype."""
    name = _NAMES.get(dtype)
    if name is not None:
        return name
    if dtype.kind in "OS":
        return "BYTES"
    if dtype.name == "bfloat16":
        return "BF16"
    hint = " Use numpy.object_ for text." if dtype.kind == "U" else ""
    raise TritonModelException(f'NumPy dtype "{dtype}" is not supported.{hint}')


def triton_to_numpy_type(data_type: int) -> Any:
    """numpy's type for a DataType's number; None for an unknown one."""
    return _NUMBERED[data_type] if 1 <= data_type < len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """A DataType's number for numpy's type; None where there is none."""
    if data_type == np.bytes_:
        return 13
    for number, found in enumerate(_NUMBERED):
        if number and data_type == found:
            return number
    return None


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """numpy's type for `TYPE_FP32`. Raises KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]
