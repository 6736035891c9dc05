"""What infer and generate have in common: what a request's headers say, and how its trace begins."""

from __future__ import annotations

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.caller import set_caller
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.headers import forwarded_http
from penstock.gateway.kserve.tracing import RequestTrace


async def model_before_body(context: KServe, exchange: Exchange, name: str, version: str) -> InferModel | None:
    """The model, before the request's body is there. None where requests load models: `found_model` gives it, once
    the body is there. Raises PenstockError."""
    on_demand = context.on_demand
    if on_demand is not None and await on_demand.offers(name, exchange.context.principal):
        return None
    return _usable(context, exchange, name, version)


async def found_model(context: KServe, exchange: Exchange, name: str, version: str) -> InferModel:
    """The model that serves the request, which is loaded for it if need be. Raises PenstockError."""
    if context.on_demand is not None:
        exchange.read_deadline()
        await context.on_demand.use(name, exchange.context, version)
    return _usable(context, exchange, name, version)


def _usable(context: KServe, exchange: Exchange, name: str, version: str) -> InferModel:
    """Of a model that a caller may not use, errors about the body would tell the inputs."""
    model = context.models.model(name, version)
    exchange.context.principal.require_model(model.name)
    return model


def complete_request(request: InferRequest, context: KServe, exchange: Exchange, model: str) -> None:
    """Sets caller, tenant, deadline and forwarded headers. Raises InvalidRequestError."""
    exchange.read_deadline()
    set_caller(request, exchange.context, model)
    pattern = context.header_forward_pattern
    if pattern is not None:
        request.parameters |= forwarded_http(exchange.scope["headers"], pattern)


def begin_trace(trace: RequestTrace, request: InferRequest, received: int) -> None:
    """`received`: when the request came in, of time.monotonic_ns()."""
    trace.mark("HTTP_RECV_START", received)
    trace.mark_now("HTTP_RECV_END")
    trace.inputs(request)
    trace.mark_now("REQUEST_START")
