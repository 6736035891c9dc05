"""Classification: an output as its best classes, `value:index[:label]`, instead of as a tensor.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from penstock.classic.base import InferModel
from penstock.classic.caching.cached_model import uncached
from penstock.classic.model_files import stays_inside
from penstock.classic.signature import ModelSignature
from penstock.classic.tensors import Array, Tensor
from penstock.engines.errors import EngineError, InvalidRequestError

_BYTES = np.dtype(np.object_)


def classified(tensor: Tensor, classes: int, *, batched: bool, labels: Sequence[str] = ()) -> Tensor:
    """BYTES of shape [classes], or [batch, classes] when the first dimension is the batch; never more classes than
    there are elements. The highest value comes first, of equal ones the lower index; NaN comes last.

    Raises InvalidRequestError for BYTES and BOOL.
    """
    if tensor.datatype in ("BYTES", "BOOL"):
        raise InvalidRequestError(
            f"class result not available for output '{tensor.name}' due to unsupported type '{tensor.datatype}'"
        )
    array = tensor.array
    rows = array.reshape(array.shape[0], -1) if batched and array.ndim and array.size else array.reshape(1, -1)
    count = min(classes, rows.shape[1])
    classes_of_rows = np.empty((len(rows), count), _BYTES)
    for position, row in enumerate(rows):
        best = _best(row, count)
        classes_of_rows[position] = [_class(row, index, labels) for index in best.tolist()]
    return Tensor(tensor.name, "BYTES", classes_of_rows if batched else classes_of_rows[0])


def _best(row: Array, count: int) -> Array:
    """The indices of the `count` highest values. Linear in the row, however long that is."""
    if row.dtype.kind not in "iu":
        row = row.astype(np.float64)
        row[np.isnan(row)] = -np.inf
    if count < len(row):
        threshold = np.partition(row, len(row) - count)[len(row) - count]
        candidates = np.flatnonzero(row >= threshold)
    else:
        candidates = np.arange(len(row))
    order = np.argsort(row[candidates][::-1], kind="stable")[::-1]
    return candidates[len(candidates) - 1 - order][:count]


def _class(row: Array, index: int, labels: Sequence[str]) -> bytes:
    value = f"{row[index]}" if row.dtype.kind in "iu" else f"{float(row[index]):f}"
    label = labels[index] if index < len(labels) else ""
    return (f"{value}:{index}:{label}" if label else f"{value}:{index}").encode()


@runtime_checkable
class Composed(Protocol):
    """A model whose outputs may come from other models: an ensemble."""

    def source(self, output: str) -> tuple[InferModel, str] | None:
        """The model and its output that this `output` is; None where it is the model's own."""
        ...


class Labels:
    """The label files of loaded models, each read once and kept as long as its model."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[ModelSignature, dict[str, Sequence[str]]] = WeakKeyDictionary()

    async def of(self, model: InferModel, output: str) -> Sequence[str]:
        """A label for each class of this output; empty where its configuration names no file. An output of an ensemble
        that has no file has the labels of the model that it comes from, as in Triton.

        Raises EngineError when the file cannot be read.
        """
        name = _label_file(model, output)
        if not name and isinstance(ensemble := uncached(model), Composed):
            source = ensemble.source(output)
            return await self.of(*source) if source is not None else ()
        known = self._known.setdefault(model.signature, {})
        if output not in known:
            folder = model.model_folder
            known[output] = await asyncio.to_thread(read_labels, folder, name) if name and folder else ()
        return known[output]


def _label_file(model: InferModel, output: str) -> str:
    return next(
        (output_config.label_filename for output_config in model.config.output if output_config.name == output), ""
    )


def read_labels(folder: Path, name: str) -> Sequence[str]:
    """One label a line. Raises EngineError when there is no such file in the model's folder."""
    try:
        if not stays_inside(name):
            raise OSError
        return tuple((folder / name).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        raise EngineError(f"the label file '{name[:128]}' cannot be read") from None
