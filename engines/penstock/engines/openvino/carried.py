"""Integers of a quantized checkpoint as constants of the graph, without loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engines.formats.quantized.integers import IntegerTensor
from penstock.engines.openvino.quantization import packed_halves, row_chunks
from penstock.engines.openvino.weight_cache import Array

_HALF_OF_8_BITS, _HALF_A_BYTE = 128, 4
_LEAST_GROUP = 8
"""Columns. Scales of smaller groups would take more memory than the weights."""
_SCALE_ERROR = 1e-3
"""Of a scale as float16, which has 11 bits: beyond this it is one that float16 has no normal number for."""


def obstacle(tensor: IntegerTensor) -> str | None:
    """Why the plugin has no quick form for this matrix; None: it has one."""
    rows, width = tensor.shape
    if width % 2 and tensor.bits <= _HALF_A_BYTE:
        return "rows that end within a byte"
    if tensor.group_of is not None:
        counts = np.bincount(tensor.group_of, minlength=tensor.num_groups)
        if (counts != width // tensor.num_groups).any():
            return "groups of different sizes"
    if tensor.num_groups > 1 and width // tensor.num_groups // _pieces(tensor) < _LEAST_GROUP:
        return f"groups that are no multiple of {_LEAST_GROUP} columns"
    zeros = tensor.layout.zeros(0, rows)
    if zeros.min() < 0 or zeros.max() >= 1 << tensor.bits:
        return f"zero points that are no levels of {tensor.bits} bits"
    return "scales beyond float16" if beyond_float16(tensor) else None


def beyond_float16(tensor: IntegerTensor) -> bool:
    """Whether its scales are too large or too small for 4 bits in groups, here and after `quantize_groups`."""
    scales = tensor.scales(0, tensor.shape[0])
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16).astype(np.float32)
    return bool((np.abs(rounded - scales) > _SCALE_ERROR * np.abs(scales)).any())


def is_rows(tensor: IntegerTensor) -> bool:
    """Whether it is symmetric int8 with a scale for each row, which `quantize_rows` makes, too."""
    zeros = tensor.layout.zeros(0, tensor.shape[0])
    return tensor.bits == 8 and tensor.num_groups == 1 and bool((zeros == _HALF_OF_8_BITS).all())


def carried_rows(tensor: IntegerTensor) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """As `quantize_rows`, of one for which `is_rows` holds."""
    rows, _ = tensor.shape
    levels = tensor.layout.levels(0, rows)
    return (levels ^ np.uint8(_HALF_OF_8_BITS)).view(np.int8), np.ascontiguousarray(tensor.scales(0, rows))


def column_order(tensor: IntegerTensor) -> npt.NDArray[np.intp] | None:
    """By which columns of a group come to stand together; None: they do."""
    return None if tensor.group_of is None else np.argsort(tensor.group_of, kind="stable")


def _pieces(tensor: IntegerTensor) -> int:
    """Into how many each group is divided, with the same scale: the plugin (2026.4, AVX2) multiplies a single row by
    groups whose size is no power of two wrongly, unless they are whole rows."""
    size = tensor.shape[1] // tensor.num_groups
    return 1 if tensor.num_groups == 1 else size // (size & -size)


def carried_groups(tensor: IntegerTensor) -> Sequence[Array]:
    """As `quantize_groups`, with the groups that the tensor has, or pieces of them, of columns in `column_order`; of 8
    bits the values and zero points are a byte each."""
    rows, width = tensor.shape
    in_bytes = tensor.bits == 8
    values = np.empty((rows, width) if in_bytes else (rows * width + 1) // 2, np.uint8)
    order = column_order(tensor)
    for start, stop in row_chunks(tensor):
        levels = tensor.layout.levels(start, stop)
        if order is not None:
            levels = levels[:, order]
        if in_bytes:
            values[start:stop] = levels
        else:
            values[start * width // 2 : (stop * width + 1) // 2] = packed_halves(levels)
    pieces = _pieces(tensor)
    zeros = np.ascontiguousarray(tensor.layout.zeros(0, rows).repeat(pieces, axis=1), np.uint8)
    scales = np.ascontiguousarray(tensor.scales(0, rows).repeat(pieces, axis=1), np.float16)[:, :, None]
    return values.reshape(-1), zeros.reshape(-1) if in_bytes else packed_halves(zeros), scales
