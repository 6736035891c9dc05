"""POST /v2/models/{model}[/versions/{version}]/infer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.classic.base import InferModel
from penstock.classic.messages import InferResponse
from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedError
from penstock.gateway.http.compression import accepted_coding, compress, content_coding
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.classification import Labels
from penstock.gateway.kserve.context import KServe, input_too_large
from penstock.gateway.kserve.http_request import begin_trace, complete_request, found_model, model_before_body
from penstock.gateway.kserve.infer_request import Inference, parse_infer
from penstock.gateway.kserve.infer_response import encode_infer
from penstock.gateway.kserve.tracing import RequestTrace

_HEADER_LENGTH = b"inference-header-content-length"
_LONG_BODY = 1 << 20
_LONG_TEXT = 1 << 16
_LONG_ANSWER = 1 << 17
"""From so many bytes of a request, of its JSON or strings, and elements of an answer, coding them is left to a thread:
it would hold up all other requests."""

_JOINED = 1 << 16
"""Bytes of a binary answer up to which it leaves in one piece."""

_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")


class Infer:
    """Answers one exchange per call. Raises PenstockError."""

    def __init__(self, context: KServe) -> None:
        self._context = context
        self._labels = Labels()

    async def __call__(self, exchange: Exchange, name: str, version: str) -> None:
        context = self._context
        with exchange.call() as call:
            received = time.monotonic_ns()
            model = await model_before_body(context, exchange, name, version)
            if model is not None:
                _check_takes_infer(model)
            coding = content_coding(exchange.headers.get(b"content-encoding"))
            length = _header_length(exchange)
            try:
                body = await exchange.read(context.max_input_bytes)
                call.watch()
                if coding:
                    body = await exchange.decompressed(coding, body, context.max_input_bytes)
            except PayloadTooLargeError as error:
                raise input_too_large(error) from None
            if model is None:
                model = await found_model(context, exchange, name, version)
                _check_takes_infer(model)
            inference = await self._parsed(body, length, model, exchange)
            complete_request(inference.request, context, exchange, model.name)
            model = context.models.model(name, version, inference.request)  # a reload may have replaced it
            trace = context.tracing.start(model.name, model.version, inference.request.id)
            if trace is not None:
                await self._traced(trace, received, exchange, model, inference)
            else:
                response = await model.infer(inference.request)
                await self._answer(exchange, model, inference, response)

    async def _parsed(self, body: bytes, length: int | None, model: InferModel, exchange: Exchange) -> Inference:
        request = exchange.context
        regions = self._context.shared_memory.of(request.principal, exchange.hold_body, request)
        if self._takes_long(body, length):
            return await self._context.pools.tensors.run(len(body), parse_infer, body, length, model, regions)
        return parse_infer(body, length, model, regions)

    def _takes_long(self, body: bytes, length: int | None) -> bool:
        """A short head can name any number of strings, in the body or in shared memory."""
        size = len(body)
        head = size if length is None else length
        if size >= _LONG_TEXT and (size >= _LONG_BODY or head >= _LONG_TEXT or b'"BYTES"' in body[:head]):
            return True
        return self._context.shared_memory.allowed and b"shared_memory_region" in body[:head]

    async def _traced(
        self,
        trace: RequestTrace,
        received: int,
        exchange: Exchange,
        model: InferModel,
        inference: Inference,
    ) -> None:
        try:
            begin_trace(trace, inference.request, received)
            response = await model.infer(inference.request)
            trace.mark_now("REQUEST_END")
            trace.outputs(response.outputs or ())
            trace.mark_now("HTTP_SEND_START")
            await self._answer(exchange, model, inference, response)
            trace.mark_now("HTTP_SEND_END")
        finally:
            trace.finish()

    async def _answer(
        self,
        exchange: Exchange,
        model: InferModel,
        inference: Inference,
        response: InferResponse,
    ) -> None:
        labels: dict[str, Sequence[str]] = {}
        for output, form in inference.forms.items():
            if form.classes:
                labels[output] = await self._labels.of(model, output)
        tensors = self._context.pools.tensors
        size = sum([tensor.array.size for tensor in response.outputs or ()])
        if size < _LONG_ANSWER:
            parts = encode_infer(inference, model, response, labels)
        else:
            parts = await tensors.run(size, encode_infer, inference, model, response, labels)
        binary = len(parts) > 1
        extra = [_BINARY, (_HEADER_LENGTH, b"%d" % len(parts[0]))] if binary else [_JSON]
        coding = accepted_coding(exchange.headers.get(b"accept-encoding"))
        if coding:
            parts = [await tensors.run(sum(map(len, parts)), compress, coding, parts)]
            extra += [(b"content-encoding", coding), (b"vary", b"accept-encoding")]
        await _respond(exchange, extra, parts)


def _check_takes_infer(model: InferModel) -> None:
    """Raises UnsupportedError."""
    if not model.takes_infer:
        raise UnsupportedError("HTTP end point doesn't support models with decoupled transaction policy")


def _header_length(exchange: Exchange) -> int | None:
    """The length of the JSON part, where the client says it. Raises InvalidRequestError."""
    given = exchange.only_header(_HEADER_LENGTH)
    if given is None:
        return None
    given = given.strip(b" \t")
    if not given.isdigit() or len(given) > 19:
        raise InvalidRequestError("Inference-Header-Content-Length is not a number")
    return int(given)


async def _respond(exchange: Exchange, headers: list[tuple[bytes, bytes]], parts: list[bytes]) -> None:
    """Long parts leave one after the other, so that they need not be copied together."""
    size = sum(map(len, parts))
    if size <= _JOINED:
        parts = [b"".join(parts)]
    start = [(b"content-length", b"%d" % size), *headers]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": start})
    last = len(parts) - 1
    for index, part in enumerate(parts):
        await exchange.raw_send({"type": "http.response.body", "body": part, "more_body": index < last})
