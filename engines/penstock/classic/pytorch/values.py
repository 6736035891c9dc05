"""Tensors as PyTorch takes and gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.classic.described import to_bytes, to_text
from penstock.classic.pytorch.library import load_torch
from penstock.classic.tensors import NUMPY_TYPES, Array, datatype_called
from penstock.engines.errors import EngineError

_BF16 = NUMPY_TYPES["BF16"]


def datatype(dtype: Any) -> str:
    """`FP32` for torch.float32; what no request can carry stays in PyTorch's words."""
    return datatype_called(str(dtype).removeprefix("torch."))


def to_torch(array: Array, device: Any, *, shared: bool) -> Any:
    """A tensor on the device. `shared`: the array is not ours, and models may write to their inputs: it is copied."""
    torch = load_torch()
    if array.dtype == _BF16:
        return to_torch(array.view(np.int16), device, shared=shared).view(torch.bfloat16)
    if device.type != "cpu":
        return torch.tensor(array, device=device)
    return torch.from_numpy(array.copy() if shared or not array.flags.writeable else array)


def to_strings(name: str, array: Array) -> list[str]:
    """Row by row. Raises InvalidRequestError for what is not UTF-8."""
    found: list[str] = to_text(name, array).ravel().tolist()
    return found


def from_torch(name: str, found: Any) -> Array:
    """An array in main memory, which no later execution changes. Raises EngineError for what is no tensor."""
    torch = load_torch()
    if not isinstance(found, torch.Tensor):
        raise EngineError(f"the model gave a {type(found).__name__} for output '{name}', which is no tensor")
    found = found.detach()
    # a copy on the CPU too: models may give a buffer that they go on writing to
    found = found.clone() if found.device.type == "cpu" else found.cpu()
    found = found.resolve_conj().resolve_neg()
    if found.dtype == torch.bfloat16:
        return np.asarray(found.contiguous().view(torch.int16).numpy()).view(_BF16)
    return np.asarray(found.numpy())


def from_strings(name: str, found: Any, dims: Sequence[int], batched: bool) -> Array:
    """A list of strings in the output's shape. Raises EngineError when it does not fit."""
    if not (isinstance(found, list) and all(isinstance(item, str) for item in found)):
        raise EngineError(f"the model gave no list of strings for output '{name}'")
    array = np.empty(len(found), np.object_)
    array[:] = found
    shape = (-1, *dims) if batched else tuple(dims)
    try:
        return to_bytes(array).reshape(shape)
    except ValueError:
        raise EngineError(f"the model gave {len(found)} strings for output '{name}' of the shape {shape}") from None
