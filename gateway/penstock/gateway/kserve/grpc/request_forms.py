"""ModelInferRequests that differ from an earlier one in nothing but their id and the bytes of their tensors.

Clients send the same names, datatypes and shapes again and again. What stands around the bytes is parsed once. A later
message with the same bytes there is read without protobuf. Its tensors are copied out of it once, so that they
are aligned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.gateway.kserve.grpc.field_limits import varint

_ID, _CONTENTS = 0x1A, 0x3A
_AROUND = frozenset({0x0A, 0x12, 0x2A, 0x32})
"""The tags of the name, the version, the inputs and the outputs. A message with others has no form: its parameters may
mean anything."""
_MAX_FORMS = 64
_MAX_BYTES = 1024
"""Of a form: it bounds what is kept, and what is looked at in vain."""
_MAX_TENSORS = 32
_NOTHING: Mapping[str, Any] = {}


class _Input(NamedTuple):
    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int
    """Bytes."""


class _Form(NamedTuple):
    model_name: str
    model_version: str
    inputs: tuple[_Input, ...]
    outputs: tuple[str, ...]


class _Split(NamedTuple):
    around: bytes
    """The message without its id and its tensors' bytes."""
    id: bytes
    contents: list[tuple[int, int]]
    """Where the bytes of each tensor begin, and how many they are."""


class KnownRequest:
    """A message of a form that is known. Has what fronts ask a ModelInferRequest for."""

    __slots__ = ("_contents", "_data", "_form", "id")

    parameters = _NOTHING

    def __init__(self, form: _Form, id: str, data: bytes, contents: list[tuple[int, int]]) -> None:
        self.id = id
        self._form = form
        self._data = data
        self._contents = contents

    @property
    def model_name(self) -> str:
        return self._form.model_name

    @property
    def model_version(self) -> str:
        return self._form.model_version

    def request(self) -> InferRequest:
        data, inputs = self._data, {}
        for (name, datatype, dtype, shape, size), (start, _) in zip(self._form.inputs, self._contents, strict=True):
            inputs[name] = Tensor(name, datatype, np.ndarray(shape, dtype, data[start : start + size]))
        return InferRequest(inputs=inputs, id=self.id, outputs=self._form.outputs)


class RequestForms:
    """The latest ones."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Form] = {}

    def known(self, data: bytes) -> KnownRequest | None:
        """The request, if its form is known and nothing is wrong with it."""
        split = _split(data)
        form = self._known.get(split.around) if split is not None else None
        if split is None or form is None or len(form.inputs) != len(split.contents):
            return None
        for expected, (_, size) in zip(form.inputs, split.contents, strict=True):
            if size != expected.size:
                return None
        try:
            return KnownRequest(form, split.id.decode(), data, split.contents)
        except UnicodeDecodeError:
            return None

    def learn(self, data: bytes, message: Any, request: InferRequest) -> None:
        """`data` has been parsed to `message` and decoded to `request`, which asks for nothing else than its fields
        say: no classes, no shared memory."""
        split = _split(data)
        tensors = request.inputs.values()
        if split is None or len(split.contents) != len(tensors):
            return
        if any(tensor.datatype == "BYTES" or not tensor.array.size for tensor in tensors):
            return
        inputs = [
            _Input(each.name, each.datatype, each.array.dtype, each.array.shape, each.array.nbytes) for each in tensors
        ]
        if len(self._known) >= _MAX_FORMS:
            del self._known[next(iter(self._known))]
        self._known[split.around] = _Form(message.model_name, message.model_version, tuple(inputs), request.outputs)


def _split(data: bytes) -> _Split | None:
    """None for a message that has no form. Whether it is a good message, is not asked here."""
    position, end = 0, len(data)
    id_start = id_end = 0
    id = b""
    around = -1
    contents: list[tuple[int, int]] = []
    while position < end:
        tag = data[position]
        try:
            size, start = varint(data, position + 1)
        except DecodeError:
            return None
        stop = start + size
        if stop > end:
            return None
        if tag == _CONTENTS:
            if not contents:
                around = position
            contents.append((start, size))
            if len(contents) > _MAX_TENSORS:
                return None
        elif contents or stop > _MAX_BYTES:
            return None
        elif tag == _ID and not id_end:
            id_start, id_end, id = position, stop, data[start:stop]
        elif tag not in _AROUND:
            return None
        position = stop
    return _Split(data[:id_start] + data[id_end:around], id, contents) if contents else None
