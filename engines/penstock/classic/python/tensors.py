"""Tensors between our requests and responses and the messages of a model's process."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from penstock.classic.messages import InferResponse
from penstock.classic.python.codes import to_error, to_fields
from penstock.classic.python.worker.arena import ReceiveArena
from penstock.classic.python.worker.wire import NUMPY, Array, Packer, decode_strings
from penstock.classic.tensors import Tensor


def pack(packer: Packer, tensor: Tensor, encoded: bytes | None = None) -> list[Any]:
    """`encoded` as for `Packer.tensor`."""
    array = tensor.array
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if tensor.datatype == "BF16":
        array = array.view(np.uint16)
    return packer.tensor(tensor.name, tensor.datatype, array, encoded)


def unpack(place: list[Any], tail: memoryview, arena: ReceiveArena) -> Tensor:
    """Over the message's tail or the shared memory, without a copy; BYTES are decoded."""
    if len(place) == 5:
        name, datatype, shape, offset, size = place
        if datatype == "BYTES":
            return Tensor(name, datatype, decode_strings(tail[offset : offset + size], shape))
        array: Array = np.ndarray(shape, NUMPY[datatype], tail, offset)
    else:
        name, datatype, shape, offset, size, segment = place
        block = arena.array(arena.loan(segment, offset), segment, offset, size)
        if datatype == "BYTES":
            return Tensor(name, datatype, decode_strings(block, shape))
        array = block.view(NUMPY[datatype]).reshape(shape)
    return Tensor(name, datatype, array.view(ml_dtypes.bfloat16) if datatype == "BF16" else array)


def pack_response(packer: Packer, response: InferResponse) -> list[Any]:
    if response.error is not None:
        return [None, None, to_fields(response.error)]
    outputs = None if response.outputs is None else [pack(packer, tensor) for tensor in response.outputs]
    return [outputs, response.parameters or None, None]


def unpack_response(fields: list[Any] | None, final: bool, tail: memoryview, arena: ReceiveArena) -> InferResponse:
    """`fields` as worker/response.py describes them; None: nothing but the final flag."""
    if fields is None:
        return InferResponse(None, final=final)
    outputs, parameters, error = fields
    if error is not None:
        return InferResponse(None, error=to_error(error), final=final)
    return InferResponse([unpack(place, tail, arena) for place in outputs], parameters or {}, final=final)
