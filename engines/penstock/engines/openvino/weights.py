"""Checkpoint tensors as graph constants: shared with the mapped file where the type stays, else converted by rows."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops
from openvino.op import Constant

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.quantized.fp8 import Float8Tensor
from penstock.engines.formats.quantized.integers import IntegerTensor
from penstock.engines.formats.quantized.mxfp4 import GROUP as MXFP4_GROUP
from penstock.engines.formats.quantized.mxfp4 import Mxfp4Tensor
from penstock.engines.formats.quantized.schemes import QuantizedTensor
from penstock.engines.formats.safetensors_file import StoredTensor
from penstock.engines.host.user_cache import user_cache
from penstock.engines.openvino.checkpoint import Checkpoint, Tensor
from penstock.engines.openvino.config import QUANTIZED, OpenVINOConfig, WeightsType
from penstock.engines.openvino.graph_nodes import Node, constant
from penstock.engines.openvino.integer_products import (
    DIVISION,
    groups_in_parts,
    is_wide,
    offset_and_scaled,
    rows_in_parts,
    rows_product,
    signed_product,
)
from penstock.engines.openvino.numerics import ModelFacts, Numerics, Wish
from penstock.engines.openvino.quantization import (
    GROUP,
    beyond_float16,
    carried_groups,
    carried_rows,
    column_order,
    is_rows,
    keeps_8_bits,
    obstacle,
    quantize_groups,
    quantize_rows,
    row_chunks,
    suits_zeros_apart,
    with_zeros_apart,
)
from penstock.engines.openvino.trials import settle
from penstock.engines.openvino.weight_cache import Array, WeightCache, cache_key

logger = logging.getLogger(__name__)

_OV_TYPES = {"BF16": ov.Type.bf16, "F16": ov.Type.f16, "F32": ov.Type.f32}
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_BYTE = 8
_NUMPY_TYPES: dict[str, npt.DTypeLike] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_STORAGE = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


class Weights:
    """Makes the constants of one graph and remembers which tensors were used."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kind: WeightsType,
        report: Report = silent,
        cache: WeightCache | None = None,
        *,
        unpacks: bool = False,
    ) -> None:
        """`cache`: where weights are kept that are not in the checkpoint as they are needed; None: in memory alone.
        `unpacks`: as `Numerics` has it."""
        self._cache = cache or WeightCache(Path(), 0, "")
        self._kept: list[Array] = []
        """What constants look into: they do not keep it alive by themselves."""
        self._checkpoint = checkpoint
        self._num_tensors = len(list(checkpoint))
        self._report = report
        self._kind = kind
        self._unpacks = unpacks
        self._used: set[str] = set()
        self._changed: Counter[str] = Counter()
        """How many matrices of a quantized checkpoint get another form, by why and which."""
        self._tables: dict[str, tuple[Node, Node | None]] = {}
        self._num_layers = 1 + max((int(match[1]) for name in checkpoint if (match := _LAYER.search(name))), default=0)

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def vector(self, name: str, size: int, *, plus: float = 0.0) -> Node:
        """A norm's or a bias's values and `plus`, f32 [size]; the checkpoint may have one row of them."""
        is_row = self._checkpoint[name].shape == (1, size)
        values = self._take(name, (1, size) if is_row else (size,)).f32().reshape(-1)
        return ops.constant(values + np.float32(plus))

    def table(self, name: str, shape: tuple[int, ...]) -> Node:
        """A small matrix, or the weights of a convolution, as they are, f32."""
        return ops.constant(self._take(name, shape).f32())

    def rows(self, names: Sequence[str], shape: tuple[int, ...]) -> Node:
        """As `table`; its rows are those of several tensors, one after another, in any portions."""
        sizes = [self._checkpoint[name].shape[:1] for name in names]
        values = [self._take(name, (*size, *shape[1:])).f32() for name, size in zip(names, sizes, strict=True)]
        joined = np.concatenate(values)
        if joined.shape != shape:
            raise UnsupportedError(
                f"tensors {', '.join(names)} have {len(joined)} rows, config.json asks for {shape[0]}"
            )
        return ops.constant(joined)

    def project(
        self, x: Node, name: str, shape: tuple[int, int], *, is_head: bool = False, transposed: bool = False
    ) -> Node:
        """x [T, in] times the transposed matrix of `shape` (out, in): [T, out]. `is_head`: the result are logits.
        `transposed`: the checkpoint has it as [in, out]."""
        tensor = self._take(name, shape, transposed)
        if name not in self._tables and isinstance(tensor, IntegerTensor) and self._is_carried(tensor):
            return self._project_carried(x, name, tensor)
        if isinstance(tensor, Mxfp4Tensor) and self._kind_of(tensor) in ("auto", "int4"):
            return ops.matmul(x, self._mxfp4(name, tensor), False, True)
        kind = self._kind_of(tensor)
        is_shared = is_head or name in self._tables
        if kind == "int4" and not is_shared and self._fits_groups(name, tensor):
            return self._project_grouped(x, name, tensor)
        if kind in QUANTIZED and not is_shared and is_wide(shape[1]) and self._is_unpacked(name):
            self._note_change(tensor, "int8")
            arrays = self._cached(name, "int8 in parts", lambda: rows_in_parts(*self._in_rows(tensor)))
            return rows_product(x, arrays)
        values, scales = self._matrix(name, tensor)
        matrix = values if values.get_element_type() == ov.Type.f32 else ops.convert(values, "f32")
        if scales is not None:
            matrix = ops.multiply(matrix, scales)
        elif matrix is not values:
            _convert_when_used(matrix)
        return ops.matmul(x, matrix, False, True)

    def look_up(self, ids: Node, name: str, shape: tuple[int, int]) -> Node:
        """Rows `ids` [T] of the matrix, f32 [T, in]. Converted after the look-up, so that no f32 table is ever made."""
        values, scales = self._matrix(name, self._take(name, shape))
        axis = ops.constant(np.int64(0))
        rows = ops.gather(values, ids, axis)
        if values.get_element_type() != ov.Type.f32:
            rows = ops.convert(rows, "f32")
        return rows if scales is None else ops.multiply(rows, ops.gather(scales, ids, axis))

    def unused(self) -> list[str]:
        """Tensors that the graph does not have, although it should."""
        return sorted(name for name in set(self._checkpoint) - self._used if not self._is_spare(name))

    def finish(self) -> None:
        """The graph has all that it needs."""
        unchanged = self._checkpoint.is_unchanged
        if not unchanged:
            logger.warning("the model's files were changed while they were read; their converted weights are not kept")
        self._cache.finish(keep=unchanged)
        for change, count in self._changed.items():
            logger.info("%d matrices of the quantized checkpoint have %s", count, change)

    def release_pages(self) -> None:
        """Gives the memory of mapped files back to the system; what is read again comes from the files again."""
        self._checkpoint.release_pages()
        self._cache.release_pages()

    def _take(self, name: str, shape: tuple[int, ...], transposed: bool = False) -> Tensor:
        """`transposed`: as floats, the checkpoint has it as [in, out]; what is quantized has the usual order."""
        tensor = self._checkpoint[name]
        is_usual = tensor.shape == shape != shape[::-1]  # as newer files have the experts of Qwen3-VL
        turned = tensor if transposed and isinstance(tensor, StoredTensor) and not is_usual else None
        stored_shape = shape if turned is None else shape[::-1]
        if tensor.shape != stored_shape:
            raise UnsupportedError(f"tensor {name} has shape {tensor.shape}, config.json asks for {stored_shape}")
        self._used.add(name)
        self._report(Loading("weights", len(self._used), self._num_tensors, "tensors"))
        return tensor if turned is None else _turned(turned)

    def _is_spare(self, name: str) -> bool:
        return name.endswith(".bias") and self._checkpoint.spare_bias(name)

    def _kind_of(self, tensor: Tensor) -> WeightsType:
        """How a matrix is held. What a quantized checkpoint has stays in as many bits; there are no floats of
        fewer than 16."""
        if self._kind != "auto" or not isinstance(tensor, QuantizedTensor):
            return self._kind
        if isinstance(tensor, Float8Tensor):
            return "bf16"
        if isinstance(tensor, Mxfp4Tensor):
            return "auto"
        return "int8" if tensor.bits == _BYTE else "int4"

    def _is_carried(self, tensor: IntegerTensor) -> bool:
        """Whether this matrix is held as the checkpoint has it, in groups."""
        fits = (tensor.bits == _BYTE) == (self._kind_of(tensor) == "int8") and self._kind_of(tensor) in QUANTIZED
        return fits and not is_rows(tensor) and obstacle(tensor) is None

    def _project_carried(self, x: Node, name: str, tensor: IntegerTensor) -> Node:
        """x times the transposed matrix, with x's values in the order of the matrix's columns."""
        order = column_order(tensor)
        if order is not None:
            x = ops.gather(x, ops.constant(order.astype(np.int32)), ops.constant(np.int64(1)))
        if self._is_unpacked(name) and suits_zeros_apart(tensor):
            return self._signed(x, name, "carried", tensor, lambda: carried_groups(tensor))
        arrays = self._cached(name, "carried", lambda: carried_groups(tensor))
        stored = ov.Type.u8 if tensor.bits == _BYTE else ov.Type.u4
        return ops.matmul(x, offset_and_scaled(arrays, tensor.shape, stored), False, True)

    def _mxfp4(self, name: str, tensor: Mxfp4Tensor) -> Node:
        """The matrix, f32, out of the checkpoint's own bytes. The plugin unpacks it while it multiplies."""
        rows, width = tensor.shape
        both = partial(_codes_and_exponents, tensor)
        codes, exponents = self._keep(both()) if tensor.layout.is_plain else self._cached(name, "mxfp4", both)
        shape = (rows, width // MXFP4_GROUP)
        values = ops.convert(constant(codes, (*shape, MXFP4_GROUP), ov.Type.f4e2m1), "f32")
        scales = ops.convert(constant(exponents, (*shape, 1), ov.Type.f8e8m0), "f32")
        return ops.reshape(ops.multiply(values, scales), np.array(tensor.shape), False)

    def _matrix(self, name: str, tensor: Tensor) -> tuple[Node, Node | None]:
        if name not in self._tables:
            self._tables[name] = self._make(name, tensor)
        return self._tables[name]

    def _fits_groups(self, name: str, tensor: Tensor) -> bool:
        if isinstance(tensor, IntegerTensor) and beyond_float16(tensor):
            return False
        return tensor.shape[1] % GROUP == 0 and not keeps_8_bits(name, self._num_layers)

    def _project_grouped(self, x: Node, name: str, tensor: Tensor) -> Node:
        """x times the transposed matrix, which is made of floats."""
        self._note_change(tensor, "int4")
        if self._is_unpacked(name):
            return self._signed(x, name, "int4", tensor, lambda: quantize_groups(tensor))
        arrays = self._cached(name, "int4", lambda: quantize_groups(tensor))
        return ops.matmul(x, offset_and_scaled(arrays, tensor.shape, ov.Type.u4), False, True)

    def _signed(self, x: Node, name: str, kind: str, tensor: Tensor, groups: Callable[[], Sequence[Array]]) -> Node:
        width = tensor.shape[1]
        arrays = self._cached(name, kind, lambda: groups_in_parts(with_zeros_apart(groups()), width))
        return signed_product(x, arrays, tensor.shape)

    def _is_unpacked(self, name: str) -> bool:
        """As `Numerics.unpacks` has it, but for experts: these have many small products. With 32 of them a step took
        1.1 to 1.2 times as long with their zero points apart."""
        return self._unpacks and not _EXPERT.search(name)

    def _in_rows(self, tensor: Tensor) -> Sequence[Array]:
        if isinstance(tensor, IntegerTensor) and is_rows(tensor):
            return carried_rows(tensor)
        return quantize_rows(tensor)

    def _note_change(self, tensor: Tensor, kind: str) -> None:
        if not isinstance(tensor, QuantizedTensor):
            return
        if not isinstance(tensor, IntegerTensor):
            self._changed[f"{tensor.bits}-bit floats, which become {kind}"] += 1
        elif not (kind == "int8" and is_rows(tensor)):
            reason = obstacle(tensor) or f"{tensor.bits} bits"
            self._changed[f"{reason}, and are converted to {kind}"] += 1

    def _cached(self, name: str, kind: str, make: Callable[[], Sequence[Array]]) -> Sequence[Array]:
        """From the cache, if it is there."""
        arrays = self._cache.arrays(f"{name} {kind}", make)
        self._checkpoint.release_pages()
        return self._keep(arrays)

    def _keep(self, arrays: Sequence[Array]) -> Sequence[Array]:
        self._kept += arrays
        return arrays

    def _make(self, name: str, tensor: Tensor) -> tuple[Node, Node | None]:
        kind = self._kind_of(tensor)
        if kind == "auto" and isinstance(tensor, Mxfp4Tensor):
            kind = "int8"  # rows are taken from it
        if kind in QUANTIZED:
            self._note_change(tensor, "int8")
            values, scales = self._cached(name, "int8", lambda: self._in_rows(tensor))
            return constant(values, tensor.shape, ov.Type.i8), ops.constant(scales)
        self._note_change(tensor, kind)
        storage = tensor.dtype if kind == "auto" else _STORAGE[kind]
        if not isinstance(tensor, StoredTensor):
            [floats] = self._cached(name, storage, lambda: [_as_floats(tensor, storage)])
            return constant(floats, tensor.shape, _OV_TYPES[storage]), None
        if storage == tensor.dtype:
            typed = tensor.data.view(np.float32 if storage == "F32" else np.uint16)
            values = ov.Tensor(typed, list(tensor.shape), _OV_TYPES[storage])
            self._kept.append(typed)
        else:
            # Memory of OpenVINO's own: an array of ours would have to be kept alive beside the graph.
            values = ov.Tensor(_OV_TYPES[storage], ov.Shape(tensor.shape))
            _convert(tensor, values.data, storage)
            self._checkpoint.release_pages()
        return Constant(values, True), None


def open_weights(
    config: OpenVINOConfig, checkpoint: Checkpoint, facts: ModelFacts, report: Report
) -> tuple[Weights, Numerics]:
    """Weights of a graph, before any is read, and the number types that it is computed in. `facts`: without those of
    the checkpoint. Weights have a cache if they are quantized, or those of the checkpoint are. Raises as
    `trials.settle` does."""
    stored = checkpoint.stored_types
    numerics = settle(Wish.of(config), replace(facts, stored=stored))
    kind = numerics.weights
    if kind != config.weights and stored.block_bits is not None:
        logger.info("the file's weights of %.1f bits on average are quantized again, to %s", stored.block_bits, kind)
    if not config.weights_cache or not (kind in QUANTIZED or checkpoint.is_quantized):
        return Weights(checkpoint, kind, report, unpacks=numerics.unpacks), numerics
    report(Loading("checksums"))
    held = f"{kind}, {DIVISION}" if numerics.unpacks else kind
    cache = WeightCache(user_cache("weights"), config.weights_cache, checkpoint_key(held, checkpoint))
    return Weights(checkpoint, kind, report, cache, unpacks=numerics.unpacks), numerics


def checkpoint_key(kind: str, checkpoint: Checkpoint) -> str:
    """`cache_key` of what is made of a checkpoint."""
    kind = kind if checkpoint.scheme is None else f"{kind} of {checkpoint.scheme}"
    return cache_key(kind, checkpoint.content_key)


def _codes_and_exponents(tensor: Mxfp4Tensor) -> Sequence[Array]:
    rows = tensor.shape[0]
    return [part.reshape(-1) for part in (tensor.layout.codes(0, rows), tensor.exponents(0, rows))]


def _turned(tensor: StoredTensor) -> StoredTensor:
    """A copy with rows and columns exchanged."""
    typed = tensor.data.view(np.float32 if tensor.dtype == "F32" else np.uint16).reshape(tensor.shape)
    return StoredTensor(tensor.dtype, tensor.shape[::-1], np.ascontiguousarray(typed.T).reshape(-1).view(np.uint8))


def _convert_when_used(convert: Node) -> None:
    """Makes a conversion of float weights part of the multiplication, by the attribute that IR files carry for this.

    Without it the plugin folds the conversion while it loads: it makes an f32 copy of the weights, of which it packs
    another copy, which takes seven times as long and three times the memory.
    """
    convert.get_rt_info()["decompression_0"] = ""


def _as_floats(tensor: Tensor, storage: str) -> Array:
    """Matrix of a quantized checkpoint; bf16 as unsigned integers."""
    values = np.empty(tensor.shape, _NUMPY_TYPES[storage])
    _convert(tensor, values, storage)
    return values


def _convert(tensor: Tensor, out: npt.NDArray[Any], storage: str) -> None:
    for start, stop in row_chunks(tensor):
        rows = tensor.rows_f32(start, stop)
        if storage == "BF16":
            out.view(np.uint16)[start:stop] = to_bf16(rows)
        elif storage == "F16":
            limit = np.float32(np.finfo(np.float16).max)
            out[start:stop] = np.clip(rows, -limit, limit)
        else:
            out[start:stop] = rows


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def round_to(value: np.float32, precision: str) -> np.float32:
    """The nearest value that bf16, f16 or f32 has."""
    if precision == "bf16":
        return (to_bf16(np.array([value])).astype(np.uint32) << 16).view(np.float32)[0]  # type: ignore[no-any-return]
    return np.float32(np.float16(value)) if precision == "f16" else value
