"""The model repository extension over HTTP: index, load, unload.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

from __future__ import annotations

import binascii
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.http.call import Call
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.json_request import read_object
from penstock.gateway.kserve.repository_control import check_model_name, load_override, unload_dependents
from penstock.gateway.kserve.store import IndexEntry

_MAX_BODY = 1 << 20


async def repository_index(context: KServe, exchange: Exchange) -> None:
    """POST /v2/repository/index."""
    body = await read_object(exchange, _MAX_BODY, optional=True)
    ready = body.pop("ready", False)
    if not isinstance(ready, bool):
        raise InvalidRequestError("'ready' must be a boolean")
    _no_more(body)
    entries = [_entry(entry) for entry in context.models.index(ready=ready)]
    await exchange.respond(200, msgspec.json.encode(entries))


def _entry(entry: IndexEntry) -> dict[str, str]:
    shown = {"name": entry.name, "version": entry.version, "state": entry.state or "", "reason": entry.reason}
    return {key: value for key, value in shown.items() if value}


async def load_model(context: KServe, exchange: Exchange, name: str) -> None:
    """POST /v2/repository/models/{name}/load. Answers when the model is ready; a client that leaves before changes
    nothing."""
    async with Call(exchange):
        check_model_name(name)
        parameters = await _parameters(exchange, context.max_input_bytes)
        override = load_override({key: _file(key, value) for key, value in parameters.items()})
        await context.models.load(name, config=override.config, files=override.files or None)
        await exchange.respond(200, b"")


async def unload_model(context: KServe, exchange: Exchange, name: str) -> None:
    """POST /v2/repository/models/{name}/unload."""
    async with Call(exchange):
        dependents = unload_dependents(await _parameters(exchange, _MAX_BODY))
        await context.models.unload(name, unload_dependents=dependents)
        await exchange.respond(200, b"")


async def _parameters(exchange: Exchange, limit: int) -> dict[str, Any]:
    body = await read_object(exchange, limit, optional=True)
    parameters = body.pop("parameters", {})
    _no_more(body)
    if not isinstance(parameters, dict):
        raise InvalidRequestError("'parameters' must be an object")
    return parameters


def _file(name: str, value: Any) -> Any:
    if not name.startswith("file:"):
        return value
    if not isinstance(value, str):
        raise InvalidRequestError(f"the load parameter '{name[:128]}' must be a string in base64")
    try:
        return binascii.a2b_base64(value.encode(), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequestError(f"the load parameter '{name[:128]}' is not base64") from None


def _no_more(body: dict[str, Any]) -> None:
    if body:
        raise InvalidRequestError(f"unknown field '{next(iter(body))[:64]}' in the request")
