"""Checkpoint tensors as graph constants: shared with the mapped file where the type stays, else converted by rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops
from openvino.op import Constant

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.errors import UnsupportedError
from penstock.engines.host.user_cache import user_cache
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import QUANTIZED, OpenVINOConfig, WeightsType
from penstock.engines.openvino.quantization import (
    GROUP,
    Tensor,
    keeps_8_bits,
    quantize_groups,
    quantize_rows,
    row_chunks,
)
from penstock.engines.openvino.weight_cache import Array, WeightCache, content_key

Node = Any
"""An OpenVINO graph node; the package has no types of its own for mypy."""

_OV_TYPES = {"BF16": ov.Type.bf16, "F16": ov.Type.f16, "F32": ov.Type.f32}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_STORAGE = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


class Weights:
    """Makes the constants of one graph and remembers which tensors were used."""

    def __init__(
        self, checkpoint: Checkpoint, kind: WeightsType, report: Report = silent, cache: WeightCache | None = None
    ) -> None:
        """`cache`: where quantized weights are kept; None: in memory alone."""
        self._cache = cache or WeightCache(Path(), 0, "")
        self._kept: list[Array] = []
        """What constants look into: they do not keep it alive by themselves."""
        self._checkpoint = checkpoint
        self._num_tensors = len(list(checkpoint))
        self._report = report
        self._kind = kind
        self._used: set[str] = set()
        self._tables: dict[str, tuple[Node, Node | None]] = {}
        self._num_layers = 1 + max((int(match[1]) for name in checkpoint if (match := _LAYER.search(name))), default=0)

    def vector(self, name: str, size: int, *, plus: float = 0.0) -> Node:
        """A norm's or a bias's values and `plus`, f32 [size]."""
        return ops.constant(self._take(name, (size,)).f32() + np.float32(plus))

    def table(self, name: str, shape: tuple[int, int]) -> Node:
        """A small matrix as it is, f32."""
        return ops.constant(self._take(name, shape).f32())

    def project(self, x: Node, name: str, shape: tuple[int, int], *, is_head: bool = False) -> Node:
        """x [T, in] times the transposed matrix of `shape` (out, in): [T, out]. `is_head`: the result are logits."""
        if self._kind == "int4" and name not in self._tables and not is_head and self._fits_groups(name, shape):
            return ops.matmul(x, self._grouped(name, self._take(name, shape)), False, True)
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

    def finish(self) -> None:
        """The graph has all that it needs."""
        self._cache.finish()

    def release_pages(self) -> None:
        """Gives the memory of mapped files back to the system; what is read again comes from the files again."""
        self._checkpoint.release_pages()
        self._cache.release_pages()

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._checkpoint[name]
        if tensor.shape != shape:
            raise UnsupportedError(f"tensor {name} has shape {tensor.shape}, config.json asks for {shape}")
        self._used.add(name)
        self._report(Loading("weights", len(self._used), self._num_tensors, "tensors"))
        return tensor

    def _matrix(self, name: str, shape: tuple[int, int]) -> tuple[Node, Node | None]:
        if name not in self._tables:
            self._tables[name] = self._make(name, self._take(name, shape))
        return self._tables[name]

    def _fits_groups(self, name: str, shape: tuple[int, int]) -> bool:
        return shape[1] % GROUP == 0 and not keeps_8_bits(name, self._num_layers)

    def _grouped(self, name: str, tensor: Tensor) -> Node:
        """The matrix, f32, out of 4 bits. The plugin knows just this form of it: zero points in 4 bits, too, the
        arithmetic in f16, and the groups joined after it."""
        values, zeros, scales = self._quantized(name, "int4", lambda: quantize_groups(tensor))
        rows, groups, _ = scales.shape
        whole = _constant(values, (rows, groups, GROUP), ov.Type.u4)
        offset = ops.subtract(ops.convert(whole, "f16"), ops.convert(_constant(zeros, scales.shape, ov.Type.u4), "f16"))
        scaled = ops.multiply(offset, _constant(scales, scales.shape, ov.Type.f16))
        return ops.convert(ops.reshape(scaled, np.array(tensor.shape), False), "f32")

    def _quantized(self, name: str, kind: str, make: Callable[[], Sequence[Array]]) -> Sequence[Array]:
        """From the cache, if it is there."""
        arrays = self._cache.arrays(f"{name} {kind}", make)
        self._checkpoint.release_pages()
        self._kept += arrays
        return arrays

    def _make(self, name: str, tensor: Tensor) -> tuple[Node, Node | None]:
        if self._kind in QUANTIZED:
            values, scales = self._quantized(name, "int8", lambda: quantize_rows(tensor))
            return _constant(values, tensor.shape, ov.Type.i8), ops.constant(scales)
        storage = tensor.dtype if self._kind == "auto" else _STORAGE[self._kind]
        if storage == tensor.dtype:
            typed = tensor.data.view(np.float32 if storage == "F32" else np.uint16)
            values = ov.Tensor(typed, list(tensor.shape), _OV_TYPES[storage])
        else:
            # Memory of OpenVINO's own: an array of ours would have to be kept alive beside the graph.
            values = ov.Tensor(_OV_TYPES[storage], ov.Shape(tensor.shape))
            _convert(tensor, values.data, storage)
        return Constant(values, True), None


def open_weights(config: OpenVINOConfig, checkpoint: Checkpoint, report: Report) -> Weights:
    """With a cache, if the weights are quantized."""
    if config.weights not in QUANTIZED or not config.weights_cache:
        return Weights(checkpoint, config.weights, report)
    tensors = ((name, (tensor := checkpoint[name]).dtype, tensor.shape, tensor.data) for name in checkpoint)
    cache = WeightCache(user_cache("weights"), config.weights_cache, content_key(config.weights, tensors))
    return Weights(checkpoint, config.weights, report, cache)


def _constant(values: Array, shape: Sequence[int], dtype: ov.Type) -> Node:
    """That looks into `values`."""
    return Constant(ov.Tensor(values, ov.Shape(list(shape)), dtype), True)


def _convert_when_used(convert: Node) -> None:
    """Makes a conversion of float weights part of the multiplication, by the attribute that IR files carry for this.

    Without it the plugin folds the conversion while it loads: it makes an f32 copy of the weights, of which it packs
    another copy, which takes seven times as long and three times the memory.
    """
    convert.get_rt_info()["decompression_0"] = ""


def _convert(tensor: Tensor, out: npt.NDArray[Any], storage: str) -> None:
    for start, stop in row_chunks(tensor):
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
