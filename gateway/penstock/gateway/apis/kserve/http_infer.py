"""POST /v2/models/{model}[/versions/{version}]/infer: the endpoint and its bodies, JSON and behind it binary tensors.

Protocol: https://github.com/kserve/open-inference-protocol and Triton's extensions for binary data, classification and
shared memory. Every size is checked against what is really there before it is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from msgspec import UNSET

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest, Parameter
from penstock.classic.model_config import datatype_name
from penstock.classic.tensors import NUMPY_TYPES, Tensor, element_count, from_buffer, to_buffer
from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.infer_heads import (
    KNOWN_BYTES,
    AnsweredOutput,
    HttpForm,
    InferAnswerHead,
    Inference,
    InputHead,
    InputParameters,
    OutputHead,
    RegionParameters,
    encode_head,
    is_plain_answer,
    known_head,
    plain_answer_head,
    read_head,
)
from penstock.gateway.apis.kserve.infer_json import from_json, to_json
from penstock.gateway.apis.kserve.parameters import boolean, forwarded_http, take_parameters
from penstock.gateway.apis.kserve.parameters import from_json as parameter_from_json
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions, SharedMemorySlice
from penstock.gateway.apis.kserve.tensor_plane import LONG_BODY, LONG_TEXT, Moments, TensorPlane
from penstock.gateway.requests.call import ServedCall
from penstock.gateway.transports.http.compression import accepted_coding, compress, content_coding
from penstock.gateway.transports.http.exchange import Exchange

HTTP_MOMENTS = Moments(
    began="HTTP_RECV_START", received="HTTP_RECV_END", sending="HTTP_SEND_START", sent="HTTP_SEND_END"
)
_HEADER_LENGTH = b"inference-header-content-length"
_JOINED = 1 << 16
"""Bytes of a binary answer up to which it leaves in one piece."""

_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")


async def infer(context: KServe, exchange: Exchange, name: str, version: str) -> None:
    """Answers the exchange. Raises PenstockError."""
    plane = context.plane
    with exchange.call() as client:
        began = time.monotonic_ns()
        model = await plane.find_before_body(name, version, exchange.context)
        if model is not None:
            _check_takes_infer(model)
        coding = content_coding(exchange.headers.get(b"content-encoding"))
        length = _header_length(exchange)
        body = await read_input(exchange, client, context.max_input_bytes, coding)
        exchange.read_deadline()
        if model is None:
            model = await plane.find(name, version, exchange.context)
            _check_takes_infer(model)
        regions = plane.regions(exchange.context, exchange.hold_body)
        if _takes_long(body, length, plane):
            inference = await plane.in_thread(len(body), parse_infer, body, length, model, regions)
        else:
            inference = parse_infer(body, length, model, regions)
        request = inference.request
        if context.header_forward_pattern is not None:
            request.parameters |= forwarded_http(exchange.scope["headers"], context.header_forward_pattern)
        call = plane.begin(model, version, request, exchange.context, HTTP_MOMENTS, began)
        try:
            response = await call.infer()
            outputs = response.outputs or []
            if inference.forms:
                outputs = await plane.in_forms(call.model, outputs, inference.forms)
            parts = await plane.encode(outputs, encode_infer, inference, call.model, outputs, response.parameters)
            await _respond(exchange, parts, plane)
            call.sent()
        finally:
            call.close()


async def read_input(exchange: Exchange, call: ServedCall, limit: int, coding: bytes = b"") -> bytes:
    """The body of a request for inference, which has this coding; from its end on the call is watched.

    Raises InvalidRequestError, OverloadedError, ClientGone, and PayloadTooLargeError with the flag that sets the limit:
    users of servers without one do not know it.
    """
    try:
        body = await exchange.read(limit)
        call.watch()
        return await exchange.decompressed(coding, body, limit) if coding else body
    except PayloadTooLargeError as error:
        raise PayloadTooLargeError(f"{error.message} --http-max-input-size sets the limit.") from None


def _check_takes_infer(model: InferModel) -> None:
    """Raises UnsupportedError."""
    if not model.takes_infer:
        raise UnsupportedError("HTTP end point doesn't support models with decoupled transaction policy")


def _takes_long(body: bytes, length: int | None, plane: TensorPlane) -> bool:
    """A short head can name any number of strings, in the body or in shared memory."""
    size = len(body)
    head = size if length is None else length
    if size >= LONG_TEXT and (size >= LONG_BODY or head >= LONG_TEXT or b'"BYTES"' in body[:head]):
        return True
    return plane.takes_memory and b"shared_memory_region" in body[:head]


def _header_length(exchange: Exchange) -> int | None:
    """The length of the JSON part, where the client says it. Raises InvalidRequestError."""
    header = exchange.only_header(_HEADER_LENGTH)
    if header is None:
        return None
    header = header.strip(b" \t")
    if not header.isdigit() or len(header) > 19:
        raise InvalidRequestError("Inference-Header-Content-Length is not a number")
    return int(header)


async def _respond(exchange: Exchange, parts: list[bytes], plane: TensorPlane) -> None:
    """`parts`: the head and binary outputs. Long ones leave one after the other, so that they need not be copied
    together."""
    headers = [_BINARY, (_HEADER_LENGTH, b"%d" % len(parts[0]))] if len(parts) > 1 else [_JSON]
    coding = accepted_coding(exchange.headers.get(b"accept-encoding"))
    if coding:
        parts = [await plane.in_thread(sum(map(len, parts)), compress, coding, parts)]
        headers += [(b"content-encoding", coding), (b"vary", b"accept-encoding")]
    size = sum(map(len, parts))
    start = [(b"content-length", b"%d" % size), *headers]
    if size <= _JOINED:
        await exchange.answer(200, start, b"".join(parts))
        return
    await exchange.send({"type": "http.response.start", "status": 200, "headers": start})
    last = len(parts) - 1
    for index, part in enumerate(parts):
        await exchange.raw_send({"type": "http.response.body", "body": part, "more_body": index < last})


# The body of a request

_MAX_CLASSES = 2**31


def parse_infer(body: bytes, header_length: int | None, model: InferModel, regions: SharedMemoryRegions) -> Inference:
    """What stands in `body`. `header_length` is the length of its JSON part; None: all of it is JSON; 0: none of it is,
    it is the model's only input. Raises InvalidRequestError, NotFoundError and UnsupportedError."""
    if header_length == 0:
        return Inference(InferRequest(inputs=raw_input(body, model)), binary=True)
    size = len(body)
    if header_length is None or header_length == size:
        head, header_length = body, size
    elif header_length > size:
        raise InvalidRequestError(f"inference header size should be in range (0, {size}), got: {header_length}")
    else:
        head = body[:header_length]
    if header_length < size and header_length <= KNOWN_BYTES:
        parsed, plain = known_head(head)
        if plain is not None and plain.body_size == size:
            return plain.inference(body)
    else:
        parsed = read_head(head)
    inputs = _Inputs(memoryview(body), header_length, model.name, regions)
    request = InferRequest(inputs=inputs.take_all(parsed.inputs), id=parsed.id or "")
    inference = Inference(request)
    if parsed.parameters is not None:
        parameters = {name: parameter_from_json(value) for name, value in parsed.parameters.items()}
        inference.binary = boolean("binary_data_output", parameters.get("binary_data_output", False))
        take_parameters(request, parameters)
    for output in parsed.outputs or ():
        if output.name in inference.forms:
            raise InvalidRequestError(f"output '{output.name[:128]}' is requested more than once")
        inference.forms[output.name] = _form(output, inference.binary, regions)
    request.outputs = tuple(inference.forms)
    return inference


class _Inputs:
    """Takes the inputs of one request from its body, the binary ones in turn."""

    def __init__(self, body: memoryview, position: int, model: str, regions: SharedMemoryRegions) -> None:
        self._body = body
        self._position = position
        self._model = model
        self._regions = regions

    def take_all(self, inputs: Sequence[InputHead]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for entry in inputs:
            if entry.name in tensors:
                raise InvalidRequestError(f"input '{entry.name[:128]}' already exists in request")
            tensors[entry.name] = self._take(entry)
        if self._position != len(self._body):
            raise InvalidRequestError(f"unexpected additional input data for model '{self._model}'")
        return tensors

    def _take(self, entry: InputHead) -> Tensor:
        parameters = entry.parameters
        if parameters is None:
            if entry.data is UNSET:
                raise _one_source()
            return from_json(entry.name, entry.datatype, entry.shape, entry.data)
        size, region = parameters.binary_data_size, parameters.shared_memory_region
        set_fields = [value for value in (entry.data, size, region) if value is not UNSET]
        if len(set_fields) != 1:
            raise _one_source()
        if entry.data is not UNSET:
            return from_json(entry.name, entry.datatype, entry.shape, entry.data)
        if size is not UNSET:
            data = self._binary(entry.name, size)
        else:
            data = _input_memory(entry, parameters, self._regions)
        return binary_tensor(entry.name, entry.datatype, entry.shape, data)

    def _binary(self, name: str, size: int) -> memoryview:
        left = len(self._body) - self._position
        if size < 0:
            raise InvalidRequestError(f"'binary_data_size' of input '{name[:128]}' must not be negative")
        if size > left:
            raise InvalidRequestError(
                f"unexpected size for input '{name[:128]}', expecting {size - left} additional bytes for model "
                f"'{self._model}'"
            )
        start = self._position
        self._position += size
        return self._body[start : self._position]


def _input_memory(entry: InputHead, parameters: InputParameters, regions: SharedMemoryRegions) -> memoryview:
    """Checked against the shape before it is read."""
    memory = _memory(entry.name, parameters, regions)
    dtype = NUMPY_TYPES.get(entry.datatype)
    count = element_count(entry.shape, entry.name)
    if dtype is not None and entry.datatype != "BYTES" and count * dtype.itemsize != memory.byte_size:
        raise InvalidRequestError(
            f"unexpected total byte size {memory.byte_size} for input '{entry.name[:128]}', expecting "
            f"{count * dtype.itemsize}"
        )
    return memory.read()


def _memory(name: str, parameters: RegionParameters, regions: SharedMemoryRegions) -> SharedMemorySlice:
    region, size = parameters.shared_memory_region, parameters.shared_memory_byte_size
    if region is UNSET or size is UNSET:
        raise InvalidRequestError(
            f"'shared_memory_region' and 'shared_memory_byte_size' of '{name[:128]}' must be given together"
        )
    return regions.slice(region, parameters.shared_memory_offset, size)


def _form(output: OutputHead, binary: bool, regions: SharedMemoryRegions) -> HttpForm:
    parameters = output.parameters
    if parameters is None:
        return HttpForm(binary=binary)
    classes = parameters.classification
    if not 0 <= classes < _MAX_CLASSES:
        raise InvalidRequestError(f"'classification' of output '{output.name[:128]}' is out of range")
    if parameters.shared_memory_region is UNSET and parameters.shared_memory_byte_size is UNSET:
        return HttpForm(classes, binary=binary if parameters.binary_data is UNSET else parameters.binary_data)
    if classes or parameters.binary_data is True:
        other = "classification" if classes else "binary_data"
        raise InvalidRequestError(f"Output can't set both 'shared_memory_region' and '{other}'")
    return HttpForm(memory=_memory(output.name, parameters, regions))


def _one_source() -> InvalidRequestError:
    return InvalidRequestError(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        "'shared_memory_region' in 'parameters'."
    )


def binary_tensor(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
    """`from_buffer` with aligned elements: behind JSON of any length they seldom are."""
    try:
        tensor = from_buffer(name, datatype, shape, data)
    except ValueError:
        raise InvalidRequestError(f"the shape of input '{name[:128]}' has too large dimensions") from None
    if not tensor.array.flags.aligned:
        tensor.array = tensor.array.copy()
    return tensor


def raw_input(body: bytes, model: InferModel) -> dict[str, Tensor]:
    """The body as the only input of a model: a batch of one, with one BYTES element or as many elements as there are
    bytes for, in a shape that has at most one variable dimension. Raises InvalidRequestError.

    Source: the raw binary request of Triton's binary tensor data extension.
    """
    config = model.config
    if len(config.input) != 1:
        raise InvalidRequestError(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.input)} inputs in "
            f"'{model.name}' model configuration"
        )
    only = config.input[0]
    datatype = datatype_name(only.data_type)
    dims = [1, *only.dims] if config.max_batch_size > 0 else list(only.dims)
    if datatype == "BYTES":
        shape = tuple(_filled(dims, 1, only.name))
        body = len(body).to_bytes(4, "little") + body
    else:
        size = NUMPY_TYPES[datatype].itemsize
        shape = tuple(_filled(dims, len(body) // size, only.name))
    return {only.name: binary_tensor(only.name, datatype, shape, memoryview(body))}


def _filled(dims: Sequence[int], count: int, name: str) -> list[int]:
    """The dims with their variable one in the size that gives `count` elements, as far as that goes."""
    if sum(dim < 0 for dim in dims) > 1:
        raise InvalidRequestError(
            f"a raw request needs a shape with at most one variable dimension, but input '{name}' has {list(dims)}"
        )
    fixed = math.prod(dim for dim in dims if dim >= 0)
    return [dim if dim >= 0 else count // fixed if fixed else 0 for dim in dims]


# The body of an answer


def encode_infer(
    inference: Inference, model: InferModel, tensors: Iterable[Tensor], parameters: dict[str, Parameter]
) -> list[bytes]:
    """The JSON header and the binary outputs, in order. `tensors` and `parameters` are those of the response.

    Outputs that go to shared memory are written there. Raises InvalidRequestError for what cannot be sent as asked.
    """
    tensors = list(tensors)
    if is_plain_answer(inference, tensors, parameters):
        shown = tuple([(tensor.name, tensor.datatype, tensor.array.shape, tensor.array.nbytes) for tensor in tensors])
        head = plain_answer_head(model.name, model.version, shown)
        return [head, *map(to_buffer, tensors)]
    parts = [b""]
    outputs = []
    forms = inference.forms
    for tensor in tensors:
        form = forms.get(tensor.name) if forms else None
        if form is not None and form.memory is not None:
            form.memory.write(to_buffer(tensor))
            outputs.append(AnsweredOutput(tensor.name, tensor.datatype, tensor.array.shape))
        else:
            outputs.append(_output(tensor, inference.binary if form is None else form.binary, parts))
    parts[0] = encode_head(
        InferAnswerHead(
            id=inference.request.id,
            model_name=model.name,
            model_version=str(model.version),
            parameters=parameters,
            outputs=outputs,
        )
    )
    return parts


def _output(tensor: Tensor, binary: bool, parts: list[bytes]) -> AnsweredOutput:
    if not binary:
        return AnsweredOutput(tensor.name, tensor.datatype, tensor.array.shape, UNSET, to_json(tensor))
    data = to_buffer(tensor)
    parts.append(data)
    return AnsweredOutput(tensor.name, tensor.datatype, tensor.array.shape, {"binary_data_size": len(data)})
