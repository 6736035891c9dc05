"""POST /v2/models/{model}[/versions/{version}]/generate and /generate_stream: plain JSON in, plain JSON out.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md, with two differences: a
model that does not give exactly one response to `generate` is an error with an error's status, and an error in a stream
is told in its own words.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.signature import ModelSignature
from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError, PenstockError
from penstock.gateway.front.intake import WorkPool
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe, input_too_large
from penstock.gateway.kserve.generate_frames import Renderer, error_frame
from penstock.gateway.kserve.generate_tensors import read_generate
from penstock.gateway.kserve.http_request import begin_trace, complete_request, found_model, model_before_body
from penstock.gateway.kserve.json_request import read_plain
from penstock.gateway.kserve.response_batches import next_together
from penstock.gateway.kserve.tracing import RequestTrace

logger = logging.getLogger(__name__)

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
_LONG_BODY = 1 << 20
_LONG_ANSWER = 1 << 17
"""From so many bytes of a body, and elements of an answer, coding them is left to a thread: it would hold up all other
requests."""


async def generate(context: KServe, exchange: Exchange, name: str, version: str = "", *, stream: bool) -> None:
    """Answers the exchange. Raises PenstockError for what ends the request before its first byte has been sent."""
    try:
        with exchange.call() as call:
            received = time.monotonic_ns()
            model = await model_before_body(context, exchange, name, version)
            try:
                body = await read_plain(exchange, context.max_input_bytes)
            except PayloadTooLargeError as error:
                raise input_too_large(error) from None
            call.watch()
            if model is None:
                model = await found_model(context, exchange, name, version)
            request = await _read(body, model.signature, context.pools.tensors)
            complete_request(request, context, exchange, model.name)
            model = context.models.model(name, version, request)  # a reload may have replaced it meanwhile
            trace = context.tracing.start(model.name, model.version, request.id)
            if trace is not None:
                begin_trace(trace, request, received)
            try:
                await (_stream if stream else _answer)(context, exchange, model, request, trace)
            finally:
                if trace is not None:
                    trace.finish()
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


async def _read(body: bytes, signature: ModelSignature, pool: WorkPool) -> InferRequest:
    if len(body) < _LONG_BODY:
        return read_generate(body, signature)
    return await pool.run(len(body), read_generate, body, signature)


async def _answer(
    context: KServe, exchange: Exchange, model: InferModel, request: InferRequest, trace: RequestTrace | None
) -> None:
    response = await _only(model, request)
    renderer = Renderer(model.name, model.version, request)
    body = await _rendered(lambda responses: renderer.body(responses[0]), [response], context.pools.tensors)
    if trace is not None:
        trace.outputs(response.outputs or ())
        trace.mark_now("REQUEST_END")
        trace.mark_now("HTTP_SEND_START")
    await exchange.respond(200, body)
    if trace is not None:
        trace.mark_now("HTTP_SEND_END")


async def _only(model: InferModel, request: InferRequest) -> InferResponse:
    """The one response. A second one cancels the request."""
    if not model.signature.decoupled:
        return await model.infer(request)
    responses = model.stream(request)
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


async def _stream(
    context: KServe, exchange: Exchange, model: InferModel, request: InferRequest, trace: RequestTrace | None
) -> None:
    """Sends the responses as they come, those that are there together in one write. A client that reads slowly is
    waited for with the next responses unasked for: the model's stream bounds what may pile up in it."""
    render, pool = Renderer(model.name, model.version, request).frames, context.pools.tensors
    responses = model.stream(request)
    send = exchange.raw_send
    try:
        batch = await next_together(responses)
        if batch and batch[0].error is not None:
            raise batch[0].error
        if trace is not None:
            trace.mark_now("HTTP_SEND_START")
        await exchange.start_stream()
        while batch and not batch[-1].final:
            _trace_outputs(trace, batch)
            data = await _rendered(render, batch, pool)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            batch = await next_together(responses)
    finally:
        responses.close()
    _trace_outputs(trace, batch)
    if trace is not None:
        trace.mark_now("REQUEST_END")
    await exchange.finish(await _rendered(render, batch, pool))
    if trace is not None:
        trace.mark_now("HTTP_SEND_END")


async def _rendered(
    render: Callable[[list[InferResponse]], bytes], responses: list[InferResponse], pool: WorkPool
) -> bytes:
    size = sum([tensor.array.size for response in responses for tensor in response.outputs or ()])
    return render(responses) if size < _LONG_ANSWER else await pool.run(size, render, responses)


def _trace_outputs(trace: RequestTrace | None, responses: list[InferResponse]) -> None:
    if trace is not None:
        for response in responses:
            trace.outputs(response.outputs or ())
