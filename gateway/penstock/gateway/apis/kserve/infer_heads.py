"""The heads of infer requests and answers over HTTP: the JSON before the binary tensors, and memories of such heads.

Clients send the same head again and again, with other elements behind it: what stands in it is read once, and written
once for answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.classic.messages import InferRequest, Parameter
from penstock.classic.tensors import NUMPY_TYPES, Tensor, element_count
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.parameters import MAX_MEMBERS
from penstock.gateway.apis.kserve.tensor_plane import OutputForm
from penstock.gateway.requests.bounded_json import decode_json

KNOWN_BYTES, _KNOWN_HEADS = 1024, 64
"""Heads that are remembered: how long they may be, and how many of requests and of answers."""

_FALSE = Raw(b"false")


class RegionParameters(Struct):
    """The parameters with which a tensor lies in shared memory."""

    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: int = 0
    shared_memory_byte_size: int | UnsetType = UNSET


class InputParameters(RegionParameters):
    binary_data_size: int | UnsetType = UNSET


class OutputParameters(RegionParameters):
    binary_data: bool | UnsetType = UNSET
    classification: int = 0


class InputHead(Struct):
    name: str
    shape: tuple[int, ...]
    datatype: str
    data: Raw | UnsetType = UNSET
    parameters: InputParameters | None = None


class OutputHead(Struct):
    name: str
    parameters: OutputParameters | None = None


class InferRequestHead(Struct):
    """Clients that write every field of a schema write null for those that they do not use."""

    inputs: list[InputHead]
    id: str | None = None
    parameters: dict[str, Raw] | None = None
    outputs: list[OutputHead] | None = None


@dataclass(slots=True)
class HttpForm(OutputForm):
    """A JSON array, or with `binary` the elements behind the JSON."""

    binary: bool = False


@dataclass(slots=True)
class Inference:
    """A request as it came over HTTP: what the model is asked, and how the answer is to be written."""

    request: InferRequest
    forms: dict[str, HttpForm] = field(default_factory=dict)
    """Of the outputs that were asked for by name."""
    binary: bool = False
    """The form of all others."""


# Of requests


class _PlainInput(NamedTuple):
    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    """In the body."""


class PlainHead(NamedTuple):
    """One of binary numbers, with nothing in it that the model or the caller has a say in."""

    inputs: tuple[_PlainInput, ...]
    body_size: int
    forms: dict[str, HttpForm]
    binary: bool

    def inference(self, body: bytes) -> Inference:
        inputs = {}
        for name, datatype, dtype, shape, start in self.inputs:
            array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, body, start)
            inputs[name] = Tensor(name, datatype, array if array.flags.aligned else array.copy())
        return Inference(InferRequest(inputs=inputs, outputs=tuple(self.forms)), self.forms, self.binary)


def read_head(head: bytes) -> InferRequestHead:
    """Raises InvalidRequestError."""
    return decode_json(head, InferRequestHead, most_members=MAX_MEMBERS)


def _read_both(head: bytes) -> tuple[InferRequestHead, PlainHead | None]:
    parsed = read_head(head)
    return parsed, _plain_head(parsed, len(head))


known_head = lru_cache(_KNOWN_HEADS)(_read_both)
"""As `read_head`, with its plain form if it has one. For heads of at most `KNOWN_BYTES`."""


def _plain_head(parsed: InferRequestHead, start: int) -> PlainHead | None:
    """None for any other head, a wrong one included."""
    parameters = parsed.parameters or {}
    binary = parameters.get("binary_data_output", _FALSE)
    if parsed.id or parameters.keys() - {"binary_data_output"} or bytes(binary) not in (b"true", b"false"):
        return None
    inputs: dict[str, _PlainInput] = {}
    for entry in parsed.inputs:
        dtype, options = NUMPY_TYPES.get(entry.datatype), entry.parameters
        if dtype is None or entry.datatype == "BYTES" or entry.name in inputs or options is None:
            return None
        if entry.data is not UNSET or options.shared_memory_region is not UNSET or options.binary_data_size is UNSET:
            return None
        try:
            count = element_count(entry.shape, entry.name)
        except InvalidRequestError:
            return None
        if not count or options.binary_data_size != count * dtype.itemsize:
            return None
        inputs[entry.name] = _PlainInput(entry.name, entry.datatype, dtype, entry.shape, start)
        start += options.binary_data_size
    outputs = parsed.outputs or []
    if any(output.parameters is not None for output in outputs):
        return None
    is_binary = bytes(binary) == b"true"
    forms = {output.name: HttpForm(binary=is_binary) for output in outputs}
    return PlainHead(tuple(inputs.values()), start, forms, is_binary) if len(forms) == len(outputs) else None


# Of answers

encode_head = msgspec.json.Encoder().encode


class AnsweredOutput(Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: Sequence[int]
    parameters: dict[str, int] | UnsetType = UNSET
    data: list[Any] | Raw | UnsetType = UNSET


class InferAnswerHead(Struct, omit_defaults=True, kw_only=True):
    id: str = ""
    model_name: str
    model_version: str
    parameters: dict[str, Parameter] = {}
    outputs: list[AnsweredOutput]


def is_plain_answer(inference: Inference, tensors: Sequence[Tensor], parameters: dict[str, Parameter]) -> bool:
    """Nothing but numbers behind the head, which says the same for every answer of these shapes."""
    if not inference.binary or inference.request.id or parameters:
        return False
    if not all(form.binary and form.memory is None for form in inference.forms.values()):
        return False
    return all(tensor.datatype != "BYTES" for tensor in tensors)


@lru_cache(_KNOWN_HEADS)
def plain_answer_head(model: str, version: int, outputs: tuple[tuple[str, str, tuple[int, ...], int], ...]) -> bytes:
    answered = [
        AnsweredOutput(name, datatype, shape, {"binary_data_size": size}) for name, datatype, shape, size in outputs
    ]
    return encode_head(InferAnswerHead(model_name=model, model_version=str(version), outputs=answered))
