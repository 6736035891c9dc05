"""The model repository extension over HTTP: index, load, unload.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

from __future__ import annotations

import binascii
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import Principal
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.json_request import no_more, read_object
from penstock.gateway.kserve.store import IndexEntry

_MAX_BODY = 1 << 20
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
