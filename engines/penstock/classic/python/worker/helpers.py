"""The plain functions of triton_python_backend_utils."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .wire import Array


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """The protocol's form of a BYTES tensor: each element behind its length as a 4-byte little-endian integer.

    An empty tensor gives an empty tuple and one that is not of bytes None, as in Triton.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type != np.bytes_:
        return None
    parts: list[bytes] = []
    for item in input_tensor.ravel().tolist():
        data = item if isinstance(item, bytes) else str(item).encode()
        parts += (struct.pack("<I", len(data)), data)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The opposite: a flat array of objects. Raises struct.error, as Triton's does, for data that is cut off."""
    items: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, position)
        position += 4
        if length > len(encoded_tensor) - position:
            left = len(encoded_tensor) - position
            raise struct.error(f"an element of {length} bytes at offset {position}, where only {left} bytes are left")
        items.append(bytes(encoded_tensor[position : position + length]))
        position += length
    found = np.empty(len(items), np.object_)
    found[:] = items
    return found


def get_input_tensor_by_name(inference_request: Any, name: str) -> Any:
    """The request's input tensor of this name, or None."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: Any, name: str) -> Any:
    """The response's output tensor of this name, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The input of this name in a model configuration, or None."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The output of this name in a model configuration, or None."""
    return _named(model_config.get("output", ()), name)


def _named(entries: Any, name: str) -> dict[str, Any] | None:
    return next((entry for entry in entries if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether the configuration makes the model a decoupled one."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
