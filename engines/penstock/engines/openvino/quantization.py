"""Weights in 8 and 4 bits, in the forms whose multiplication OpenVINO's CPU plugin does without unpacking them first.

Both are made while the checkpoint is read, a few rows at a time, so that memory holds little beyond the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.engines.openvino.checkpoint import Tensor

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


def keeps_8_bits(name: str, num_layers: int) -> bool:
    """Of a matrix in 4-bit weights: those that hurt most, as llama.cpp's Q4_K_M chooses them (`use_more_bits` of
    src/llama-quant.cpp): values and the MLP's last matrix in the first and last eighth of the layers, and in every
    third between."""
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
