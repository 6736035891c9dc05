"""InferResponse to ModelInferResponse: as a message, or at once as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from penstock.classic.messages import Parameter
from penstock.classic.tensors import Tensor, buffer_of, to_buffer
from penstock.gateway.errors import public_message
from penstock.gateway.kserve.parameters import FINAL, write_parameters
from penstock.gateway.kserve.tensor_plane import OutputForm


def fill_response(
    message: Any, outputs: Iterable[Tensor], parameters: Mapping[str, Parameter], forms: Mapping[str, OutputForm] | None
) -> None:
    """Outputs go to raw_output_contents, an empty entry for those that go to shared memory. `parameters` are those of
    the response."""
    add, append = message.outputs.add, message.raw_output_contents.append
    for tensor in outputs:
        form = forms.get(tensor.name) if forms is not None else None
        data = to_buffer(tensor)
        if form is None or form.memory is None:
            add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
            append(data)
            continue
        form.memory.write(data)
        output = add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        output.parameters["shared_memory_region"].string_param = form.memory.region_name
        output.parameters["shared_memory_byte_size"].int64_param = len(data)
        append(b"")
    if parameters:
        write_parameters(message.parameters, parameters)


def stream_error(error: Exception, request_id: str, model_name: str = "", final: bool | None = None) -> bytes:
    """A message that ends a request, or tells an error in its midst. `final` is None for requests that never began:
    these have no flag."""
    message = ModelStreamInferResponse(error_message=public_message(error))
    message.infer_response.id = request_id
    if final is not None:
        message.infer_response.model_name = model_name
        message.infer_response.parameters[FINAL].bool_param = final
    return bytes(message.SerializeToString())


def empty_final(request_id: str, model_name: str) -> bytes:
    """The end of a request without a last response."""
    message = ModelStreamInferResponse(infer_response=ModelInferResponse(model_name=model_name, id=request_id))
    message.infer_response.parameters[FINAL].bool_param = True
    return bytes(message.SerializeToString())


# Responses as bytes. Most of them differ from an earlier one in their contents only: a token, a flag, scores. What
# stands around the contents is made once for each form of a response and used again. That is allowed: the fields of a
# message may come in any order.

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
