"""POST /v2/models/{model}[/versions/{version}]/generate and /generate_stream: plain JSON in, plain JSON out.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md, with two differences: a
model that does not give exactly one response to `generate` is an error with an error's status, and an error in a stream
is told in its own words.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Raw
from msgspec.json import encode as encode_json

from penstock.classic.base import ResponseStream
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.signature import ModelSignature, TensorSignature
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.errors import kserve_error_body
from penstock.gateway.apis.kserve.http_infer import HTTP_MOMENTS, read_input
from penstock.gateway.apis.kserve.infer_json import from_json, to_json
from penstock.gateway.apis.kserve.json_request import check_plain
from penstock.gateway.apis.kserve.parameters import MAX_MEMBERS, forwarded_http, take_parameters
from penstock.gateway.apis.kserve.parameters import from_json as parameter_from_json
from penstock.gateway.apis.kserve.tensor_plane import LONG_BODY, TensorCall, TensorPlane
from penstock.gateway.requests.bounded_json import decode_checked, decode_json, has_all_members
from penstock.gateway.transports.http.exchange import Exchange

logger = logging.getLogger(__name__)

MAX_TOGETHER = 64
"""Responses of a stream that leave in one write."""

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


async def generate(context: KServe, exchange: Exchange, name: str, version: str = "", *, stream: bool) -> None:
    """Answers the exchange. Raises PenstockError for what ends the request before its first byte has been sent."""
    try:
        with exchange.call() as client:
            began = time.monotonic_ns()
            plane = context.plane
            model = await plane.find_before_body(name, version, exchange.context)
            check_plain(exchange)
            body = await read_input(exchange, client, context.max_input_bytes)
            exchange.read_deadline()
            if model is None:
                model = await plane.find(name, version, exchange.context)
            if len(body) < LONG_BODY:
                request = read_generate(body, model.signature)
            else:
                request = await plane.in_thread(len(body), read_generate, body, model.signature)
            if context.header_forward_pattern is not None:
                request.parameters |= forwarded_http(exchange.scope["headers"], context.header_forward_pattern)
            call = plane.begin(model, version, request, exchange.context, HTTP_MOMENTS, began)
            try:
                await (_stream if stream else _answer)(plane, exchange, call)
                call.sent()
            finally:
                call.close()
    except PenstockError as error:
        if not exchange.streaming:
            raise
        exchange.context.record.failed(error)
        await exchange.finish(error_frame(error))
    except Exception as error:
        if not exchange.streaming:
            raise
        exchange.context.record.failed(error)
        logger.exception("Unexpected error")
        await exchange.finish(error_frame(error))


async def _answer(plane: TensorPlane, exchange: Exchange, call: TensorCall) -> None:
    response = await _only(call)
    renderer = Renderer(call.model.name, call.model.version, call.request)
    await exchange.respond(200, await plane.encode(response.outputs or (), renderer.body, response))


async def _only(call: TensorCall) -> InferResponse:
    """The one response. A second one cancels the request."""
    if not call.model.signature.decoupled:
        return await call.infer()
    responses = call.stream()
    only: InferResponse | None = None
    try:
        async for response in responses:
            if response.error is not None:
                raise response.error
            if response.outputs is None:
                continue
            if only is not None:
                raise InvalidRequestError(_NOT_ONE)
            only = response
    finally:
        responses.close()
    if only is None:
        raise InvalidRequestError(_NOT_ONE)
    return only


async def _stream(plane: TensorPlane, exchange: Exchange, call: TensorCall) -> None:
    """Sends the responses as they come, those that are there together in one write. A client that reads slowly is
    waited for with the next responses unasked for: the model's stream bounds what may pile up in it."""
    render = Renderer(call.model.name, call.model.version, call.request).frames
    responses = call.stream()
    try:
        batch = await next_together(responses)
        if batch and batch[0].error is not None:
            raise batch[0].error
        await exchange.start_stream()
        while batch and not batch[-1].final:
            data = await plane.encode(_outputs(batch), render, batch)
            if data:
                await exchange.raw_send({"type": "http.response.body", "body": data, "more_body": True})
            batch = await next_together(responses)
    finally:
        responses.close()
    await exchange.finish(await plane.encode(_outputs(batch), render, batch))


def _outputs(responses: list[InferResponse]) -> list[Tensor]:
    return [tensor for response in responses for tensor in response.outputs or ()]


async def next_together(stream: ResponseStream) -> list[InferResponse]:
    """Waits for a response, and takes with it those that need no waiting for; empty when the stream has ended."""
    try:
        responses = [await stream.__anext__()]
    except StopAsyncIteration:
        return []
    while not responses[-1].final and len(responses) < MAX_TOGETHER:
        more = stream.ready()
        if more is None:
            break
        responses.append(more)
    return responses


# The body of a request, for models that know nothing of JSON: a key that is the name of an input makes a tensor, any
# other one a parameter

_NESTED = "parameters"
_ID = "id"
_BLANK = b"[] \t\r\n"

_Fields = Mapping[str, Raw]
"""Values are decoded when it is known what they are, so that long arrays never become Python lists as a whole."""


def read_generate(body: bytes, signature: ModelSignature) -> InferRequest:
    """Raises InvalidRequestError."""
    fields = decode_json(body, dict[str, Raw], most_members=MAX_MEMBERS)
    _check_keys(body, fields, signature)
    request = InferRequest(inputs={})
    nested = fields.pop(_NESTED, None)
    if _ID in fields:
        request.id = _id(fields.pop(_ID))
    parameters = _taken(request, fields, signature)
    if nested is not None:
        parameters |= _taken(request, _nested(nested, signature), signature)
    take_parameters(request, parameters)
    return request


def _taken(request: InferRequest, fields: _Fields, signature: ModelSignature) -> dict[str, object]:
    """Gives the request its tensors; returns the parameters."""
    parameters: dict[str, object] = {}
    for name, value in fields.items():
        tensor = signature.inputs.get(name)
        if tensor is None:
            parameters[name] = parameter_from_json(value)
        elif name in request.inputs:
            raise InvalidRequestError(f"input '{name}' already exists in request")
        else:
            request.inputs[name] = _tensor(tensor, bytes(value), signature.batched)
    return parameters


def _nested(value: Raw, signature: ModelSignature) -> _Fields:
    if _NESTED in signature.inputs:
        raise InvalidRequestError(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    if bytes(value)[:1] != b"{":
        raise InvalidRequestError(f"Expected JSON object for keyword: '{_NESTED}'")
    fields = decode_checked(bytes(value), dict[str, Raw])
    _check_keys(bytes(value), fields, signature)
    return fields


def _check_keys(text: bytes, fields: _Fields, signature: ModelSignature) -> None:
    """Raises InvalidRequestError, for an input in Triton's words, where a key stands twice in an object: one of the two
    would be lost."""
    if has_all_members(text, len(fields)):
        return
    again: dict[int, str] = {}
    """By the place where the input stands for the second time: Triton names the first of those."""
    for name in signature.inputs.keys() & fields.keys():
        places = [match.start() for match in re.finditer(re.escape(encode_json(name)) + rb"\s*:", text)]
        if len(places) > 1:
            again[places[1]] = name
    if again:
        raise InvalidRequestError(f"input '{again[min(again)]}' already exists in request")
    raise InvalidRequestError("a key stands more than once in the request")


def _id(value: Raw) -> str:
    if bytes(value)[:1] != b'"':
        raise InvalidRequestError(f"Unable to parse '{_ID}': it must be a string")
    return decode_checked(bytes(value), str)


def _tensor(signature: TensorSignature, text: bytes, batched: bool) -> Tensor:
    """A scalar or an array in the shape that it must have. How an array is nested is not looked at, as in Triton."""
    if text[:1] != b"[":
        text = b"[" + text + b"]"
    shape = _shape(signature, _count(signature.datatype, text), batched)
    return from_json(signature.name, signature.datatype, shape, Raw(text))


def _count(datatype: str, text: bytes) -> int:
    """Elements of an array, if those are what the datatype asks for; decoding finds out."""
    if datatype == "BYTES":
        return text.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') // 2
    return text.count(b",") + 1 if text.translate(None, _BLANK) else 0


def _shape(signature: TensorSignature, count: int, batched: bool) -> tuple[int, ...]:
    """The innermost variable dimension takes what the fixed ones leave of the elements; the others are 1."""
    dims = [-1, *signature.dims] if batched else list(signature.dims)
    fixed = math.prod(dim for dim in dims if dim >= 0)
    variable = [index for index, dim in enumerate(dims) if dim < 0]
    if count % fixed if fixed and variable else count != fixed:
        raise InvalidRequestError(f"The schema can not convert input '{signature.name}' to tensor with proper shape")
    shape = [max(dim, 1) if dim < 0 else dim for dim in dims]
    if variable and fixed:
        shape[variable[-1]] = count // fixed
    return tuple(shape)


# Responses as flat JSON objects with sorted keys, alone or as server-sent events

_encode = msgspec.json.Encoder().encode
_DATA = b"data: "
_END = b"\n\n"
_HALF = ("FP16", "BF16")


class Renderer:
    """Renders the responses of one request to a model. Nearly all of a stream's frames is the same from response to
    response, so it is rendered once for each set of outputs and only the tensors' JSON is spliced in."""

    def __init__(self, model: str, version: int, request: InferRequest) -> None:
        self._head = {"model_name": _encode(model), "model_version": _encode(str(version))}
        if request.id:
            self._head["id"] = _encode(request.id)
        self._names: tuple[str, ...] | None = None
        self._layout: list[tuple[bytes, int | None]] = []
        """For each key that holds a tensor: what stands before its value, and which tensor of the response it is. The
        last one is what ends the object."""

    def body(self, response: InferResponse) -> bytes:
        """The response as an object."""
        return b"{" + self._fields(response) + b"}"

    def frames(self, responses: Iterable[InferResponse]) -> bytes:
        """The responses as events; those that are nothing but the final flag give none."""
        parts: list[bytes] = []
        for response in responses:
            if response.error is not None:
                parts.append(error_frame(response.error))
            elif response.outputs is not None:
                parts += (_DATA, b"{", self._fields(response), b"}", _END)
        return b"".join(parts)

    def _fields(self, response: InferResponse) -> bytes:
        outputs = response.outputs or []
        if response.parameters:
            values = {tensor.name: _json(tensor) for tensor in outputs}
            values |= {name: _encode(value) for name, value in response.parameters.items()}
            return _object(self._head | values)
        names = tuple([tensor.name for tensor in outputs])
        if names != self._names:
            self._lay_out(names)
        parts: list[bytes] = []
        for before, index in self._layout:
            parts.append(before)
            if index is not None:
                parts.append(_json(outputs[index]))
        return b"".join(parts)

    def _lay_out(self, names: tuple[str, ...]) -> None:
        values: dict[str, bytes | int] = {**self._head, **{name: index for index, name in enumerate(names)}}
        layout: list[tuple[bytes, int | None]] = []
        before = b""
        for name in sorted(values):
            before += (b"," if before or layout else b"") + _encode(name) + b":"
            value = values[name]
            if isinstance(value, int):
                layout.append((before, value))
                before = b""
            else:
                before += value
        self._layout = [*layout, (before, None)]
        self._names = names


def error_frame(error: Exception) -> bytes:
    """The error as an event. Triton's own says `An Error Occurred` or what the model said."""
    return _DATA + kserve_error_body(error) + _END


def _object(values: dict[str, bytes]) -> bytes:
    return b",".join([_encode(name) + b":" + values[name] for name in sorted(values)])


def _json(tensor: Tensor) -> bytes:
    """One element as a scalar, more of them or none as a flat array. NaN and infinities, which JSON lacks, are null;
    bytes that are no UTF-8 text are replaced: this front has no binary form to refer to."""
    array = tensor.array
    if tensor.datatype == "BYTES":
        texts = [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in array.flat]
        return _encode(texts[0] if len(texts) == 1 else texts)
    if array.size != 1:
        return _encode(to_json(tensor))
    value = array.item()
    return _encode(float(value) if tensor.datatype in _HALF else value)
