"""Weights in 8 and 4 bits, in the forms whose multiplication OpenVINO's CPU plugin does without unpacking them first:
made of floats, or carried over from a quantized checkpoint without loss.

They are made while the checkpoint is read, a few rows at a time, so that memory holds little beyond the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from penstock.engines.formats.quantized.integers import IntegerTensor
from penstock.engines.openvino.checkpoint import Tensor
from penstock.engines.openvino.weight_cache import Array

GROUP = 128
"""Weights of a row that share a scale and a zero point in 4 bits. The plugin quantizes activations by the same number:
smaller groups are more exact and slower (64 rows: 64 take 1.3 times as long, 32 take 1.5 times)."""

_LEVELS = 15
_CHUNK_ELEMENTS = 4_000_000
"""Float32 elements converted at a time, which bounds the memory beyond the result."""
_SMALLEST_SCALE = np.float32(6e-8)
"""The least positive float16."""
_SENSITIVE = re.compile(
    r"\.(?:layers|h)\.(\d+)\..*(v_proj|down_proj|mlp\.c_proj|fc2|dense_4h_to_h|experts\.\d+\.w2)\.weight"
)

_GATES = re.compile(r"\.linear_attn\.(in_proj_(a|b|ba)|[ab]_proj)\.weight")
"""Of delta nets: they decide how states decay and what is written to them, and have a row for each head."""


def quantize_rows(tensor: Tensor) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Symmetric int8 with a scale for each row: values [rows, width], scales [rows, 1].

    An all-zero row gets scale 1.
    """
    out = np.empty(tensor.shape, np.int8)
    scales = np.empty((tensor.shape[0], 1), np.float32)
    for start, stop in row_chunks(tensor):
        rows = tensor.rows_f32(start, stop)
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        scale[scale == 0] = 1
        scales[start:stop] = scale
        out[start:stop] = np.rint(rows / scale)
    return out, scales


def quantize_groups(tensor: Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """Asymmetric 4 bits: values of [rows, groups, GROUP] and zero points of [rows, groups, 1], two in a byte, the first
    in its low half; scales f16 [rows, groups, 1].

    A value q stands for (q - zero) * scale. Zero is always exact; of the rest, each group's least and greatest value
    set the range. The width has to be a multiple of GROUP.
    """
    rows, width = tensor.shape
    groups = width // GROUP
    packed = np.empty((rows, width // 2), np.uint8)
    scales = np.empty((rows, groups, 1), np.float16)
    zeros = np.empty((rows, groups, 1), np.uint8)
    for start, stop in row_chunks(tensor):
        grouped = tensor.rows_f32(start, stop).reshape(-1, groups, GROUP)
        low = np.minimum(grouped.min(axis=2, keepdims=True), 0)
        high = np.maximum(grouped.max(axis=2, keepdims=True), 0)
        scale = np.maximum((high - low) / np.float32(_LEVELS), _SMALLEST_SCALE).astype(np.float16)
        inverse = np.float32(1) / scale.astype(np.float32)
        zero = np.clip(np.rint(-low * inverse), 0, _LEVELS)
        grouped *= inverse
        grouped += zero
        np.clip(np.rint(grouped, out=grouped), 0, _LEVELS, out=grouped)
        levels = grouped.astype(np.uint8).reshape(stop - start, width)
        packed[start:stop] = levels[:, 0::2] | (levels[:, 1::2] << 4)
        scales[start:stop], zeros[start:stop] = scale, zero
    return packed.reshape(-1), packed_halves(zeros), scales


_MIDDLE = 8
"""Of the 16 levels of 4 bits: the least of the signed ones is so far below zero."""


def with_zeros_apart(arrays: Sequence[Array]) -> Sequence[Array]:
    """Of what `quantize_groups` gives, whose values it overwrites: signed values q - 8 (i4, packed alike), scales, and
    shares f32 [rows, groups], which are left out where all zero points are 8.

    A row times x is then the sum over its groups of the signed values times x, times the scale, and of the share,
    (8 - zero) * scale, times the sum of x. The shares are exact: the 11 bits of a scale times 4 bits. So the matrix is
    the same one. Of few rows the plugin (2026.4, AVX2) multiplies these in 0.65 to 0.85 of the time that it takes to
    unpack values with zero points; of 64 rows and more in the same time.
    """
    values, zeros, scales = arrays
    np.bitwise_xor(values, _MIDDLE << 4 | _MIDDLE, out=values)
    levels = np.stack([zeros & _LEVELS, zeros >> 4], axis=1).reshape(-1)[: scales.size].reshape(scales.shape[:2])
    if (levels == _MIDDLE).all():
        return values, scales
    return values, scales, (np.float32(_MIDDLE) - levels) * scales[:, :, 0].astype(np.float32)


def keeps_8_bits(name: str, num_layers: int) -> bool:
    """Of a matrix in 4-bit weights: those that hurt most, as llama.cpp's Q4_K_M chooses them (`use_more_bits` of
    src/llama-quant.cpp): values and the MLP's last matrix in the first and last eighth of the layers, and in every
    third between. Beside these, the small ones of delta nets."""
    if _GATES.search(name):
        return True
    match = _SENSITIVE.search(name)
    if match is None:
        return False
    layer, eighth = int(match[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def row_chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Bounds of rows that are converted together."""
    rows, width = tensor.shape
    height = max(1, _CHUNK_ELEMENTS // max(1, width))
    for start in range(0, rows, height):
        yield start, min(rows, start + height)


def packed_halves(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Numbers below 16, two in a byte, the first in its low half."""
    flat = np.zeros(values.size + values.size % 2, np.uint8)
    flat[: values.size] = values.reshape(-1)
    packed: npt.NDArray[np.uint8] = np.bitwise_or(flat[0::2], flat[1::2] << 4)
    return packed


_HALF_OF_8_BITS, _HALF_A_BYTE = 128, 4
_LEAST_GROUP = 8
"""Columns. Scales of smaller groups would take more memory than the weights."""
_LEAST_GROUP_APART = 64
"""Columns. Their shares take an eighth as much memory as the values."""
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


def suits_zeros_apart(tensor: IntegerTensor) -> bool:
    """Whether `with_zeros_apart` gains for this matrix of a checkpoint: it needs no shares, or its groups are large."""
    if tensor.bits != _HALF_A_BYTE:
        return False  # of 2 bits, parts that cancel each other would be several times larger than the sum
    if tensor.shape[1] // tensor.num_groups // _pieces(tensor) >= _LEAST_GROUP_APART:
        return True
    return bool((tensor.layout.zeros(0, tensor.shape[0]) == _MIDDLE).all())


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
