"""Checkpoint tensors as graph constants: shared with the mapped file where the type stays, else converted by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops
from openvino.op import Constant

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.gguf.tensors import BlockTensor
from penstock.engines.formats.safetensors_file import StoredTensor
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import WeightsType

Node = Any
"""An OpenVINO graph node; the package has no types of its own for mypy."""

_OV_TYPES = {"BF16": ov.Type.bf16, "F16": ov.Type.f16, "F32": ov.Type.f32}
Tensor = StoredTensor | BlockTensor

_STORAGE = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
_CHUNK_ELEMENTS = 4_000_000
"""Float32 elements converted at a time, which bounds the memory beyond the result."""


class Weights:
    """Makes the constants of one graph and remembers which tensors were used."""

    def __init__(self, checkpoint: Checkpoint, kind: WeightsType, report: Report = silent) -> None:
        self._checkpoint = checkpoint
        self._num_tensors = len(list(checkpoint))
        self._report = report
        self._kind = kind
        self._used: set[str] = set()
        self._tables: dict[str, tuple[Node, Node | None]] = {}

    def vector(self, name: str, size: int, *, plus: float = 0.0) -> Node:
        """A norm's or a bias's values and `plus`, f32 [size]."""
        return ops.constant(self._take(name, (size,)).f32() + np.float32(plus))

    def table(self, name: str, shape: tuple[int, int]) -> Node:
        """A small matrix as it is, f32."""
        return ops.constant(self._take(name, shape).f32())

    def project(self, x: Node, name: str, shape: tuple[int, int]) -> Node:
        """x [T, in] times the transposed matrix of `shape` (out, in): [T, out]."""
        values, scales = self._matrix(name, shape)
        matrix = values if values.get_element_type() == ov.Type.f32 else ops.convert(values, "f32")
        if scales is not None:
            matrix = ops.multiply(matrix, scales)
        elif matrix is not values:
            _convert_when_used(matrix)
        return ops.matmul(x, matrix, False, True)

    def look_up(self, ids: Node, name: str, shape: tuple[int, int]) -> Node:
        """Rows `ids` [T] of the matrix, f32 [T, in]. Converted after the look-up, so that no f32 table is ever made."""
        values, scales = self._matrix(name, shape)
        axis = ops.constant(np.int64(0))
        rows = ops.gather(values, ids, axis)
        if values.get_element_type() != ov.Type.f32:
            rows = ops.convert(rows, "f32")
        return rows if scales is None else ops.multiply(rows, ops.gather(scales, ids, axis))

    def unused(self) -> list[str]:
        return sorted(set(self._checkpoint) - self._used)

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._checkpoint[name]
        if tensor.shape != shape:
            raise UnsupportedError(f"tensor {name} has shape {tensor.shape}, config.json asks for {shape}")
        self._used.add(name)
        self._report(Loading("weights", len(self._used), self._num_tensors, "tensors"))
        return tensor

    def _matrix(self, name: str, shape: tuple[int, int]) -> tuple[Node, Node | None]:
        if name not in self._tables:
            self._tables[name] = self._make(self._take(name, shape))
        return self._tables[name]

    def _make(self, tensor: Tensor) -> tuple[Node, Node | None]:
        if self._kind == "int8":
            values = ov.Tensor(ov.Type.i8, ov.Shape(tensor.shape))
            return Constant(values, True), ops.constant(quantize_rows(tensor, values.data))
        storage = tensor.dtype if self._kind == "auto" else _STORAGE[self._kind]
        if storage == tensor.dtype:
            typed = tensor.data.view(np.float32 if storage == "F32" else np.uint16)
            values = ov.Tensor(typed, list(tensor.shape), _OV_TYPES[storage])
        else:
            # Memory of OpenVINO's own: an array of ours would have to be kept alive beside the graph.
            values = ov.Tensor(_OV_TYPES[storage], ov.Shape(tensor.shape))
            _convert(tensor, values.data, storage)
        return Constant(values, True), None


def _convert_when_used(convert: Node) -> None:
    """Makes a conversion of float weights part of the multiplication, by the attribute that IR files carry for this.

    Without it the plugin folds the conversion while it loads: it makes an f32 copy of the weights, of which it packs
    another copy, which takes seven times as long and three times the memory.
    """
    convert.get_rt_info()["decompression_0"] = ""


def quantize_rows(tensor: Tensor, out: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    """Symmetric int8 with a scale for each row: fills `out` [rows, width], returns scales [rows, 1].

    An all-zero row gets scale 1.
    """
    scales = np.empty((tensor.shape[0], 1), np.float32)
    for start, stop in _chunks(tensor):
        rows = tensor.rows_f32(start, stop)
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        scale[scale == 0] = 1
        scales[start:stop] = scale
        out[start:stop] = np.rint(rows / scale)
    return scales


def _convert(tensor: Tensor, out: npt.NDArray[Any], storage: str) -> None:
    for start, stop in _chunks(tensor):
        rows = tensor.rows_f32(start, stop)
        if storage == "BF16":
            out.view(np.uint16)[start:stop] = _to_bf16(rows)
        elif storage == "F16":
            limit = np.float32(np.finfo(np.float16).max)
            out[start:stop] = np.clip(rows, -limit, limit)
        else:
            out[start:stop] = rows


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def round_to(value: np.float32, precision: str) -> np.float32:
    """The nearest value that bf16, f16 or f32 has."""
    if precision == "bf16":
        return (_to_bf16(np.array([value])).astype(np.uint32) << 16).view(np.float32)[0]  # type: ignore[no-any-return]
    return np.float32(np.float16(value)) if precision == "f16" else value


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    rows, width = tensor.shape
    height = max(1, _CHUNK_ELEMENTS // max(1, width))
    for start in range(0, rows, height):
        yield start, min(rows, start + height)
