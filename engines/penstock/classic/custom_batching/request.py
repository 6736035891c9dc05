"""A waiting request, as custom batching sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.classic.messages import InferRequest, Parameter
from penstock.classic.tensors import Tensor


@dataclass(frozen=True, slots=True)
class InputInfo:
    datatype: str
    """In the protocol's words: FP32, BYTES."""
    shape: tuple[int, ...]
    """As the client sent it, the batch dimension first."""
    byte_size: int
    """As it travels: each element of BYTES with four bytes for its length."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """What can be known of it without its data."""

    batch_size: int
    inputs: Mapping[str, InputInfo]
    parameters: Mapping[str, Parameter]
    id: str
    """Empty when the client has given none."""
    priority: int
    """As the client has asked; 0: the model's default level."""


def waiting_request(request: InferRequest, batch_size: int) -> WaitingRequest:
    return WaitingRequest(
        batch_size=batch_size,
        inputs=MappingProxyType({name: _info(tensor) for name, tensor in request.inputs.items()}),
        parameters=MappingProxyType(request.parameters),
        id=request.id,
        priority=request.priority,
    )


def _info(tensor: Tensor) -> InputInfo:
    array = tensor.array
    strings = tensor.datatype == "BYTES"
    byte_size = 4 * array.size + sum(map(len, array.flat)) if strings else array.nbytes
    return InputInfo(tensor.datatype, array.shape, byte_size)
