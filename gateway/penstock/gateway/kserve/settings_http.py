"""Trace and log settings, and the registry of shared memory regions, over HTTP.

https://github.com/triton-inference-server/server/tree/main/docs/protocol: extension_trace.md, extension_logging.md,
extension_shared_memory.md. Each function answers its exchange, or raises PenstockError.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError
from penstock.gateway.front.context import Principal
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.json_request import no_more, read_object
from penstock.gateway.kserve.shared_memory import RegionStatus
from penstock.gateway.kserve.store import ModelStore

_MAX_BODY = 1 << 20
_encode = msgspec.json.Encoder().encode


def check_traced_model(models: ModelStore, caller: Principal, model: str) -> None:
    """Raises InvalidRequestError in Triton's words when settings are asked for a model that there is not,
    PermissionDeniedError for one that the caller may not use; "" is for everything."""
    if not model:
        return
    caller.require_model(model)
    try:
        models.model(model)
    except ModelNotFoundError:
        raise InvalidRequestError(f"Request for unknown model : {model[:256]}") from None


async def trace_settings(context: KServe, exchange: Exchange, model: str = "", *, update: bool) -> None:
    """GET and POST of /v2/trace/setting and /v2/models/{model}/trace/setting."""
    check_traced_model(context.models, exchange.context.principal, model)
    if update:
        context.tracing.update(await read_object(exchange, _MAX_BODY), model)
        await context.spread()
    await exchange.respond(200, _encode(context.tracing.settings(model)))


async def log_settings(context: KServe, exchange: Exchange, *, update: bool) -> None:
    """GET and POST of /v2/logging."""
    if update:
        context.logs.update(await read_object(exchange, _MAX_BODY))
    await exchange.respond(200, _encode(context.logs.settings()))


async def shared_memory_status(context: KServe, exchange: Exchange, kind: str, region: str = "") -> None:
    """GET /v2/{kind}sharedmemory[/region/{region}]/status; `kind` is system or cuda."""
    regions = context.shared_memory.of(exchange.context.principal)
    found = regions.status(region) if kind == "system" else regions.cuda_status(region)
    await exchange.respond(200, _encode([_status(each) for each in found]))


def _status(status: RegionStatus) -> dict[str, Any]:
    return {"name": status.name, "key": status.key, "offset": status.offset, "byte_size": status.byte_size}


async def register_shared_memory(context: KServe, exchange: Exchange, kind: str, region: str) -> None:
    """POST /v2/{kind}sharedmemory/region/{region}/register."""
    body = await read_object(exchange, _MAX_BODY)
    if kind == "cuda":
        context.shared_memory.register_cuda(region)
    for field in ("key", "byte_size"):
        if field not in body:
            raise InvalidRequestError(f"Shared memory register request has no '{field}' field")
    key = body.pop("key")
    if not isinstance(key, str):
        raise InvalidRequestError("'key' must be a string")
    offset, byte_size = _taken_unsigned(body, "offset"), _taken_unsigned(body, "byte_size")
    no_more(body)
    regions = context.shared_memory.of(exchange.context.principal)
    regions.register(region, key, offset, byte_size)
    await context.spread()
    await exchange.respond(200, b"")


def _taken_unsigned(body: dict[str, Any], name: str) -> int:
    value = body.pop(name, 0)
    if type(value) is not int or not 0 <= value < 2**64:
        raise InvalidRequestError(f"'{name}' must be an unsigned 64-bit integer")
    return value


async def unregister_shared_memory(context: KServe, exchange: Exchange, kind: str, region: str = "") -> None:
    """POST /v2/{kind}sharedmemory[/region/{region}]/unregister."""
    if kind == "cuda":
        context.shared_memory.unregister_cuda(region)
    else:
        context.shared_memory.of(exchange.context.principal).unregister(region)
        await context.spread()
    await exchange.respond(200, b"")
