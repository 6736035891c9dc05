"""Responses of one request on a stream, as bytes.

Most of them differ in their contents only: a token, a flag, a score. What stands around the contents is made once for
each form of a response and used again. That is allowed: the fields of a message may come in any order.
"""

from __future__ import annotations

from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from penstock.classic.tensors import Tensor, to_buffer
from penstock.gateway.kserve.grpc.parameters import FINAL

_MAX_FORMS = 8
_Form = tuple[object, ...]
"""Whether it is the last response, and each output's name, datatype and shape."""


class StreamEncoder:
    """For responses without parameters, whose outputs all go into the message."""

    def __init__(self, model_name: str, model_version: int, request_id: str) -> None:
        self._response = ModelInferResponse(model_name=model_name, model_version=str(model_version), id=request_id)
        self._known: dict[_Form, bytes] = {}

    def encode(self, outputs: list[Tensor], *, final: bool) -> bytes:
        """A ModelStreamInferResponse."""
        form = (final, *[(tensor.name, tensor.datatype, tensor.array.shape) for tensor in outputs])
        parts = [self._known.get(form) or self._around(form, outputs, final)]
        for tensor in outputs:
            data = to_buffer(tensor)
            parts += (_CONTENTS, _number(len(data)), data)
        size = sum(map(len, parts))
        return b"".join((_RESPONSE, _number(size), *parts))

    def _around(self, form: _Form, outputs: list[Tensor], final: bool) -> bytes:
        message = ModelInferResponse()
        message.CopyFrom(self._response)
        message.parameters[FINAL].bool_param = final
        for tensor in outputs:
            message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        made = bytes(message.SerializeToString())
        if len(self._known) < _MAX_FORMS:
            self._known[form] = made
        return made


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
_CONTENTS = _number(ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _BYTES)
_RESPONSE = _number(ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | _BYTES)
