"""Responses as bytes.

Most of them differ from an earlier one in their contents only: a token, a flag, scores. What stands around the contents
is made once for each form of a response and used again. That is allowed: the fields of a message may come in any order.
"""

from __future__ import annotations

from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from penstock.classic.tensors import Tensor, buffer_of
from penstock.gateway.kserve.grpc.parameters import FINAL

_MAX_FORMS = 256
_Form = tuple[object, ...]
"""The model, whether it is the last response of a stream, and each output's name, datatype and shape."""


class ResponseForms:
    """For responses without parameters, whose outputs all go into the message."""

    def __init__(self) -> None:
        self._known: dict[_Form, bytes] = {}

    def __len__(self) -> int:
        return len(self._known)

    def around(self, model: str, version: int, final: bool | None, outputs: list[Tensor]) -> bytes:
        """All of a response but its id and contents. `final` is None outside of streams."""
        form = (model, version, final, *[(tensor.name, tensor.datatype, tensor.array.shape) for tensor in outputs])
        return self._known.get(form) or self._made(form, model, version, final, outputs)

    def _made(self, form: _Form, model: str, version: int, final: bool | None, outputs: list[Tensor]) -> bytes:
        message = ModelInferResponse(model_name=model, model_version=str(version))
        if final is not None:
            message.parameters[FINAL].bool_param = final
        for tensor in outputs:
            message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        made = bytes(message.SerializeToString())
        if len(self._known) >= _MAX_FORMS:
            del self._known[next(iter(self._known))]
        self._known[form] = made
        return made


class ResponseEncoder:
    """Of one request."""

    __slots__ = ("_forms", "_id", "_model", "_version")

    def __init__(self, forms: ResponseForms, model: str, version: int, request_id: str) -> None:
        self._forms = forms
        self._model = model
        self._version = version
        id = request_id.encode()
        self._id = b"".join((_ID, _number(len(id)), id)) if id else b""

    def encode(self, outputs: list[Tensor]) -> bytes:
        """A ModelInferResponse."""
        return b"".join(self._parts(outputs, None))

    def encode_for_stream(self, outputs: list[Tensor], *, final: bool) -> bytes:
        """A ModelStreamInferResponse."""
        parts = self._parts(outputs, final)
        size = sum(map(len, parts))
        return b"".join((_RESPONSE, _number(size), *parts))

    def _parts(self, outputs: list[Tensor], final: bool | None) -> list[bytes | memoryview]:
        parts: list[bytes | memoryview] = [self._forms.around(self._model, self._version, final, outputs), self._id]
        for tensor in outputs:
            data = buffer_of(tensor)
            parts += (_CONTENTS, _number(len(data)), data)
        return parts


def _number(value: int) -> bytes:
    """As protobuf writes it."""
    if value < 0x80:
        return _ONE_BYTE[value]
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_ONE_BYTE = [bytes((value,)) for value in range(0x80)]
_BYTES = 2
"""Protobuf's type of fields with a length in front."""
_ID = _number(ModelInferResponse.ID_FIELD_NUMBER << 3 | _BYTES)
_CONTENTS = _number(ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _BYTES)
_RESPONSE = _number(ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | _BYTES)
