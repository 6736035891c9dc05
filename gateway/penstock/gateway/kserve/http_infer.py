"""POST /v2/models/{model}[/versions/{version}]/infer."""

from __future__ import annotations

import time

from penstock.classic.base import InferModel
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.http.compression import accepted_coding, compress, content_coding
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.headers import forwarded_http
from penstock.gateway.kserve.http_bodies import read_input
from penstock.gateway.kserve.infer_request import parse_infer
from penstock.gateway.kserve.infer_response import encode_infer
from penstock.gateway.kserve.tensor_plane import LONG_BODY, LONG_TEXT, Moments, TensorPlane

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
    given = exchange.only_header(_HEADER_LENGTH)
    if given is None:
        return None
    given = given.strip(b" \t")
    if not given.isdigit() or len(given) > 19:
        raise InvalidRequestError("Inference-Header-Content-Length is not a number")
    return int(given)


async def _respond(exchange: Exchange, parts: list[bytes], plane: TensorPlane) -> None:
    """`parts`: the head and binary outputs. Long ones leave one after the other, so that they need not be copied
    together."""
    headers = [_BINARY, (_HEADER_LENGTH, b"%d" % len(parts[0]))] if len(parts) > 1 else [_JSON]
    coding = accepted_coding(exchange.headers.get(b"accept-encoding"))
    if coding:
        parts = [await plane.in_thread(sum(map(len, parts)), compress, coding, parts)]
        headers += [(b"content-encoding", coding), (b"vary", b"accept-encoding")]
    size = sum(map(len, parts))
    if size <= _JOINED:
        parts = [b"".join(parts)]
    start = [(b"content-length", b"%d" % size), *headers]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": start})
    last = len(parts) - 1
    for index, part in enumerate(parts):
        await exchange.raw_send({"type": "http.response.body", "body": part, "more_body": index < last})
