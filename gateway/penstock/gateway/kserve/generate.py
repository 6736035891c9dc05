"""POST /v2/models/{model}[/versions/{version}]/generate and /generate_stream: plain JSON in, plain JSON out.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md, with two differences: a
model that does not give exactly one response to `generate` is an error with an error's status, and an error in a stream
is told in its own words.
"""

from __future__ import annotations

import logging
import time

from penstock.classic.base import ResponseStream
from penstock.classic.messages import InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.generate_frames import Renderer, error_frame
from penstock.gateway.kserve.generate_tensors import read_generate
from penstock.gateway.kserve.headers import forwarded_http
from penstock.gateway.kserve.http_bodies import check_plain, read_input
from penstock.gateway.kserve.http_infer import HTTP_MOMENTS
from penstock.gateway.kserve.tensor_plane import LONG_BODY, TensorCall, TensorPlane

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
    found: InferResponse | None = None
    try:
        async for response in responses:
            if response.error is not None:
                raise response.error
            if response.outputs is None:
                continue
            if found is not None:
                raise InvalidRequestError(_NOT_ONE)
            found = response
    finally:
        responses.close()
    if found is None:
        raise InvalidRequestError(_NOT_ONE)
    return found


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
        found = [await stream.__anext__()]
    except StopAsyncIteration:
        return []
    while not found[-1].final and len(found) < MAX_TOGETHER:
        more = stream.ready()
        if more is None:
            break
        found.append(more)
    return found
