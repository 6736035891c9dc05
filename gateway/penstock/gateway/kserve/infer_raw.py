"""Binary tensors in a request's body."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.classic.base import InferModel
from penstock.classic.model_config import datatype_name
from penstock.classic.tensors import NUMPY_TYPES, Tensor, from_buffer
from penstock.engines.errors import InvalidRequestError


def binary_tensor(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
    """`from_buffer` with aligned elements: behind JSON of any length they seldom are."""
    try:
        tensor = from_buffer(name, datatype, shape, data)
    except ValueError:
        raise InvalidRequestError(f"the shape of input '{name[:128]}' has too large dimensions") from None
    if not tensor.array.flags.aligned:
        tensor.array = tensor.array.copy()
    return tensor


def raw_input(body: bytes, model: InferModel) -> dict[str, Tensor]:
    """The body as the only input of a model: a batch of one, with one BYTES element or as many elements as there are
    bytes for, in a shape that has at most one variable dimension. Raises InvalidRequestError.

    Source: the raw binary request of Triton's binary tensor data extension.
    """
    config = model.config
    if len(config.input) != 1:
        raise InvalidRequestError(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.input)} inputs in "
            f"'{model.name}' model configuration"
        )
    given = config.input[0]
    datatype = datatype_name(given.data_type)
    dims = [1, *given.dims] if config.max_batch_size > 0 else list(given.dims)
    if datatype == "BYTES":
        shape = tuple(_filled(dims, 1, given.name))
        body = len(body).to_bytes(4, "little") + body
    else:
        size = NUMPY_TYPES[datatype].itemsize
        shape = tuple(_filled(dims, len(body) // size, given.name))
    return {given.name: binary_tensor(given.name, datatype, shape, memoryview(body))}


def _filled(dims: Sequence[int], count: int, name: str) -> list[int]:
    """The dims with their variable one in the size that gives `count` elements, as far as that goes."""
    if sum(dim < 0 for dim in dims) > 1:
        raise InvalidRequestError(
            f"a raw request needs a shape with at most one variable dimension, but input '{name}' has {list(dims)}"
        )
    fixed = math.prod(dim for dim in dims if dim >= 0)
    return [dim if dim >= 0 else count // fixed if fixed else 0 for dim in dims]
