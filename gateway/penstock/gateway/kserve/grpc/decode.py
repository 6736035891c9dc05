"""ModelInferRequest to InferRequest. Tensors lie in raw contents, in typed fields, or in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.classic.tensors import NUMPY_TYPES, Tensor, element_count, from_buffer
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.kserve.grpc.request_forms import check_fields
from penstock.gateway.kserve.parameters import take_request_parameters
from penstock.gateway.kserve.shared_memory import SharedMemoryRegions, SharedMemorySlice
from penstock.gateway.kserve.tensor_plane import OutputForm

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
    for each in message.inputs:
        name, datatype, shape = each.name, each.datatype, tuple(each.shape)
        if name in inputs:
            raise InvalidRequestError(f"input '{name}' already exists in request", param=name)
        region = _region(each, regions) if each.parameters else None
        if region is not None:
            if each.HasField("contents"):
                raise InvalidRequestError(
                    f"unexpected 'contents' for input '{name}' for model '{model.name}': it is in shared memory"
                )
            inputs[name] = _from_region(name, datatype, shape, region)
        elif count:
            if each.HasField("contents"):
                raise InvalidRequestError(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for model "
                    f"'{model.name}'"
                )
            if used == count:
                raise _no_data(name, model)
            inputs[name] = from_buffer(name, datatype, shape, raw[used])
            used += 1
        elif each.HasField("contents"):
            inputs[name] = from_contents(name, datatype, shape, each.contents, model.name)
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
    for each in outputs:
        if each.name in names:
            raise InvalidRequestError(f"output '{each.name}' already exists in request", param=each.name)
        names[each.name] = None
        if each.parameters:
            form = OutputForm(memory=_region(each, regions))
            form.classes = _classes(each)
            if form.classes and form.memory is not None:
                raise InvalidRequestError("Output can't set both 'shared_memory_region' and 'classification'")
            if form.classes or form.memory is not None:
                forms[each.name] = form
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
