"""ModelInferRequests that differ from an earlier one in nothing but their id and the bytes of their tensors.

Clients send the same names, datatypes and shapes again and again. What stands around the bytes is parsed once. A later
message with the same bytes there is read without protobuf. Its tensors are copied out of it once, so that they
are aligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from penstock.classic.messages import InferRequest
from penstock.classic.tensors import MAX_DIMS, Tensor
from penstock.engines.errors import InvalidRequestError

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
            _Input(item.name, item.datatype, item.array.dtype, item.array.shape, item.array.nbytes) for item in tensors
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


# Fields of a message, counted before it is parsed. Two bytes are an empty input or output on the wire and hundreds in
# memory: a message of 60 MiB could ask for gigabytes, and for the event loop for half a minute, before anything in it
# is looked at.

MAX_FIELDS = 1 << 14
"""Of a message, of its inputs, outputs and parameters. What lies in `contents` is data, as in `raw_input_contents`."""

_PARAMETERS, _INPUTS, _OUTPUTS = 4, 5, 6
_SHAPE = 3
_MAX_VARINT = 10
_MAX_SHAPE_BYTES = MAX_DIMS * _MAX_VARINT


def check_fields(data: bytes) -> None:
    """Raises InvalidRequestError for too many fields and dimensions, DecodeError for what is no message."""
    left = MAX_FIELDS
    for number, start, end in _fields(data, 0, len(data)):
        left -= 1
        if number in (_PARAMETERS, _INPUTS, _OUTPUTS):
            for inner, first, last in _fields(data, start, end):
                left -= 1
                if left < 0:
                    break
                if number == _INPUTS and inner == _SHAPE and last - first > _MAX_SHAPE_BYTES:
                    raise InvalidRequestError(f"an input has more than {MAX_DIMS} dimensions")
        if left < 0:
            raise InvalidRequestError(f"the request has more than {MAX_FIELDS} fields")


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of each field, and where its content begins and ends."""
    while position < end:
        tag, start = varint(data, position)
        match tag & 7:
            case 0:
                _, position = varint(data, start)
            case 1:
                position = start + 8
            case 2:
                size, start = varint(data, start)
                position = start + size
            case 5:
                position = start + 4
            case _:  # groups: no field of ours is one, and they could hide what stands behind them
                raise DecodeError
        if position > end:
            raise DecodeError
        yield tag >> 3, start, position


def varint(data: bytes, position: int) -> tuple[int, int]:
    """The number and the position behind it. Raises DecodeError."""
    if position < len(data) and data[position] < 0x80:
        return data[position], position + 1
    value = 0
    for index, byte in enumerate(data[position : position + _MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise DecodeError
