"""ModelInferRequest to InferRequest, and InferResponse to ModelInferResponse: as a message, or at once as bytes.

Tensors lie in raw contents, in typed fields, or in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest, Parameter
from penstock.classic.tensors import NUMPY_TYPES, Tensor, buffer_of, element_count, from_buffer, to_buffer
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.grpc.request_forms import check_fields
from penstock.gateway.apis.kserve.parameters import FINAL, take_request_parameters, write_parameters
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions, SharedMemorySlice
from penstock.gateway.apis.kserve.tensor_plane import OutputForm
from penstock.gateway.errors import public_message

_LONG_MESSAGE = 1 << 16
"""Bytes from which the fields of a message are counted before it is parsed."""


@dataclass(slots=True)
class Decoded:
    request: InferRequest
    forms: dict[str, OutputForm] | None
    """By output, of those that are not answered by their tensors in the response; None: there is none."""
    empty_final: bool
    """The end is to be told even by an empty response."""


def parse(data: bytes) -> Any:
    """The ModelInferRequest. Raises InvalidRequestError."""
    try:
        if len(data) >= _LONG_MESSAGE:
            check_fields(data)
        return ModelInferRequest.FromString(data)
    except DecodeError:
        raise InvalidRequestError("the request message cannot be decoded") from None


def decode(message: Any, model: InferModel, regions: SharedMemoryRegions) -> Decoded:
    """Raises InvalidRequestError, NotFoundError and UnsupportedError. Inputs are views of the message's bytes."""
    request = InferRequest(inputs=_inputs(message, model, regions), id=message.id)
    forms = None
    if message.outputs:
        request.outputs, forms = _outputs(message.outputs, regions)
    empty_final = take_request_parameters(request, message.parameters) if message.parameters else False
    return Decoded(request, forms, empty_final)


def _inputs(message: Any, model: InferModel, regions: SharedMemoryRegions) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    raw = message.raw_input_contents
    used, count = 0, len(raw)
    for tensor in message.inputs:
        name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
        if name in inputs:
            raise InvalidRequestError(f"input '{name}' already exists in request", param=name)
        region = _region(tensor, regions) if tensor.parameters else None
        if region is not None:
            if tensor.HasField("contents"):
                raise InvalidRequestError(
                    f"unexpected 'contents' for input '{name}' for model '{model.name}': it is in shared memory"
                )
            inputs[name] = _from_region(name, datatype, shape, region)
        elif count:
            if tensor.HasField("contents"):
                raise InvalidRequestError(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for model "
                    f"'{model.name}'"
                )
            if used == count:
                raise _no_data(name, model)
            inputs[name] = from_buffer(name, datatype, shape, raw[used])
            used += 1
        elif tensor.HasField("contents"):
            inputs[name] = from_contents(name, datatype, shape, tensor.contents, model.name)
        else:
            raise _no_data(name, model)
    if used != count:
        raise InvalidRequestError(
            f"raw_input_contents has {count} entries, but {used} inputs of model '{model.name}' take their data there"
        )
    return inputs


def _from_region(name: str, datatype: str, shape: tuple[int, ...], region: SharedMemorySlice) -> Tensor:
    """Checked against the shape before it is read."""
    dtype, count = NUMPY_TYPES.get(datatype), element_count(shape, name)
    if dtype is not None and datatype != "BYTES" and count * dtype.itemsize != region.byte_size:
        raise InvalidRequestError(
            f"unexpected total byte size {region.byte_size} for input '{name}', expecting {count * dtype.itemsize}"
        )
    return from_buffer(name, datatype, shape, region.read())


def _no_data(name: str, model: InferModel) -> InvalidRequestError:
    return InvalidRequestError(f"unable to find data for input tensor '{name}' for model '{model.name}' in request.")


def _outputs(outputs: Any, regions: SharedMemoryRegions) -> tuple[tuple[str, ...], dict[str, OutputForm] | None]:
    forms: dict[str, OutputForm] = {}
    names: dict[str, None] = {}
    for output in outputs:
        if output.name in names:
            raise InvalidRequestError(f"output '{output.name}' already exists in request", param=output.name)
        names[output.name] = None
        if output.parameters:
            form = OutputForm(memory=_region(output, regions))
            form.classes = _classes(output)
            if form.classes and form.memory is not None:
                raise InvalidRequestError("Output can't set both 'shared_memory_region' and 'classification'")
            if form.classes or form.memory is not None:
                forms[output.name] = form
    return tuple(names), forms or None


def _classes(output: Any) -> int:
    if "classification" not in output.parameters:
        return 0
    parameter = output.parameters["classification"]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidRequestError("invalid value type for 'classification' parameter, expected int64_param")
    classes = int(parameter.int64_param)
    if classes < 1:
        raise InvalidRequestError(f"the 'classification' of output '{output.name}' must be at least 1")
    return classes


def _region(tensor: Any, regions: SharedMemoryRegions) -> SharedMemorySlice | None:
    """The part of a region that an input or output names, if it does."""
    parameters = tensor.parameters
    if "shared_memory_region" not in parameters:
        return None
    region = parameters["shared_memory_region"]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise InvalidRequestError("invalid value type for 'shared_memory_region' parameter, expected string_param.")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequestError(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
            f"'{tensor.name}'"
        )
    offset = _size(parameters, "shared_memory_offset") if "shared_memory_offset" in parameters else 0
    return regions.slice(region.string_param, offset, _size(parameters, "shared_memory_byte_size"))


def _size(parameters: Any, name: str) -> int:
    parameter = parameters[name]
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param"):
        raise InvalidRequestError(f"invalid value type for '{name}' parameter, expected int64_param.")
    size = int(getattr(parameter, kind))
    if size < 0:
        raise InvalidRequestError(f"'{name}' must not be negative")
    return size


_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""FP16 and BF16 have no field: they travel as raw contents only."""
_WIRE_TYPES = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def from_contents(name: str, datatype: str, shape: Sequence[int], contents: Any, model: str) -> Tensor:
    """The tensor in `contents`. Raises InvalidRequestError when it is not in the datatype's field, when there are more
    or fewer elements than the shape asks for, and for integers that the datatype cannot hold."""
    field = _FIELDS.get(datatype)
    for descriptor, _ in contents.ListFields():
        if descriptor.name != field:
            shown = datatype if datatype in NUMPY_TYPES else "<invalid>"
            raise InvalidRequestError(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type "
                f"'{_WIRE_TYPES[descriptor.name]}', expected datatype '{shown}'"
            )
    count = element_count(shape, name)
    values = getattr(contents, field) if field is not None else ()
    if field is None or len(values) != count:
        raise InvalidRequestError(
            f"unexpected number of elements {len(values)} for input '{name}' for model '{model}', expecting {count}"
        )
    dtype = NUMPY_TYPES[datatype]
    if datatype == "BYTES":
        array = np.empty(count, np.object_)
        array[:] = values
        return Tensor(name, datatype, array.reshape(shape))
    wide = np.fromiter(values, NUMPY_TYPES[_WIRE_TYPES[field]], count)
    if dtype.itemsize < wide.dtype.itemsize and count:
        limits = np.iinfo(dtype)
        if wide.min() < limits.min or wide.max() > limits.max:
            raise InvalidRequestError(f"input '{name}' has values that {datatype} cannot hold")
    return Tensor(name, datatype, wide.astype(dtype, copy=False).reshape(shape))


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
        return self._known.get(form) or self._encoded(form, model, version, final, outputs)

    def _encoded(self, form: _Form, model: str, version: int, final: bool | None, outputs: list[Tensor]) -> bytes:
        message = ModelInferResponse(model_name=model, model_version=str(version))
        if final is not None:
            message.parameters[FINAL].bool_param = final
        for tensor in outputs:
            message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        around = bytes(message.SerializeToString())
        if len(self._known) >= _MAX_FORMS:
            del self._known[next(iter(self._known))]
        self._known[form] = around
        return around


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
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_ONE_BYTE = [bytes((value,)) for value in range(0x80)]
_BYTES = 2
"""Protobuf's type of fields with a length in front."""
_ID = _number(ModelInferResponse.ID_FIELD_NUMBER << 3 | _BYTES)
_CONTENTS = _number(ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _BYTES)
_RESPONSE = _number(ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | _BYTES)
