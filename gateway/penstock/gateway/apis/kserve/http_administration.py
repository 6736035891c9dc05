"""Trace and log settings, the registry of shared memory regions, and the model repository, over HTTP.

https://github.com/triton-inference-server/server/tree/main/docs/protocol: extension_trace.md, extension_logging.md,
extension_shared_memory.md, extension_model_repository.md. Each function answers its exchange, or raises PenstockError.
"""

from __future__ import annotations

import binascii
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.json_request import no_more, read_object
from penstock.gateway.apis.kserve.shared_memory import RegionStatus
from penstock.gateway.apis.kserve.store import IndexEntry, ModelStore
from penstock.gateway.requests.context import Principal
from penstock.gateway.transports.http.exchange import Exchange

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
    statuses = regions.status(region) if kind == "system" else regions.cuda_status(region)
    await exchange.respond(200, _encode([_status(item) for item in statuses]))


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


# The model repository

_FILE = "file:"


async def repository_index(context: KServe, exchange: Exchange) -> None:
    """POST /v2/repository/index."""
    body = await read_object(exchange, _MAX_BODY, optional=True)
    ready = body.pop("ready", False)
    if not isinstance(ready, bool):
        raise InvalidRequestError("'ready' must be a boolean")
    no_more(body)
    principal = exchange.context.principal
    entries = [_entry(entry, principal) for entry in context.models.index(ready=ready) if principal.may_use(entry.name)]
    await exchange.respond(200, msgspec.json.encode(entries))


def _entry(entry: IndexEntry, principal: Principal) -> dict[str, str]:
    reason = entry.reason_for(principal)
    shown = {"name": entry.name, "version": entry.version, "state": entry.state or "", "reason": reason}
    return {key: value for key, value in shown.items() if value}


async def load_model(context: KServe, exchange: Exchange, name: str) -> None:
    """POST /v2/repository/models/{name}/load. Answers when the model is ready; loading goes on when the client leaves
    before. Parameters are `config`, a ModelConfig in JSON, and `file:<path>`, contents in base64; unlike in Triton,
    unknown ones are the client's error and not the server's."""
    with exchange.call():
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, value in (await _parameters(exchange, context.max_input_bytes)).items():
            if key != "config" and not key.startswith(_FILE):
                raise InvalidRequestError(f"unrecognized load parameter '{key[:64]}'")
            if not isinstance(value, str):
                raise InvalidRequestError(f"the load parameter '{key[:64]}' must be a string")
            if key == "config":
                config = value
            else:
                files[key.removeprefix(_FILE)] = _contents(key, value)
        await context.models.load(name, config=config, files=files or None)
        await exchange.respond(200, b"")


async def unload_model(context: KServe, exchange: Exchange, name: str) -> None:
    """POST /v2/repository/models/{name}/unload, with the one parameter `unload_dependents`."""
    with exchange.call():
        parameters = await _parameters(exchange, _MAX_BODY)
        dependents = parameters.pop("unload_dependents", False)
        if parameters:
            raise InvalidRequestError(f"unrecognized unload parameter '{next(iter(parameters))[:64]}'")
        if not isinstance(dependents, bool):
            raise InvalidRequestError("the unload parameter 'unload_dependents' must be a boolean")
        await context.models.unload(name, unload_dependents=dependents)
        await exchange.respond(200, b"")


async def _parameters(exchange: Exchange, limit: int) -> dict[str, Any]:
    body = await read_object(exchange, limit, optional=True)
    parameters = body.pop("parameters", None)
    no_more(body)
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidRequestError("'parameters' must be an object")
    return parameters


def _contents(name: str, value: str) -> bytes:
    try:
        return binascii.a2b_base64(value.encode(), strict_mode=True)
    except binascii.Error:
        raise InvalidRequestError(f"the load parameter '{name[:64]}' is not base64") from None
