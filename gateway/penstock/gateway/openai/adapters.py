"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's server has them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import UnsupportedError
from penstock.gateway.errors import HttpError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.adapter_control import AdapterControl

_TEXT = b"text/plain; charset=utf-8"


class LoadRequest(msgspec.Struct):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct):
    lora_name: str


_R = TypeVar("_R", LoadRequest, UnloadRequest)


class LoadAdapter:
    schema = LoadRequest

    def __init__(self, adapters: AdapterControl, settings: AppSettings) -> None:
        self._adapters = adapters
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        with exchange.call() as call:
            wanted = await _read(exchange, self._adapters, self._settings, self.schema)
            if wanted.is_3d_lora_weight:
                raise UnsupportedError("is_3d_lora_weight is not supported.", param="is_3d_lora_weight")
            call.watch()
            await self._adapters.load(
                wanted.lora_name, wanted.lora_path, base=wanted.base_model_name, replace=wanted.load_inplace
            )
            await _say(exchange, f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")


class UnloadAdapter:
    schema = UnloadRequest

    def __init__(self, adapters: AdapterControl, settings: AppSettings) -> None:
        self._adapters = adapters
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        with exchange.call() as call:
            wanted = await _read(exchange, self._adapters, self._settings, self.schema)
            call.watch()
            await self._adapters.unload(wanted.lora_name)
            await _say(exchange, f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")


async def _read(exchange: Exchange, adapters: AdapterControl, settings: AppSettings, kind: type[_R]) -> _R:
    """The body. Raises HttpError 403 on a server whose adapters stay as they are, InvalidRequestError."""
    if not adapters.allowed:
        message = "Adapters can be loaded and unloaded only on a server that was started with --lora-directory."
        raise HttpError(403, message, code="lora_directory_not_set")
    body = await exchange.body(settings.max_body_bytes)
    return decode_json(body, kind)


async def _say(exchange: Exchange, text: str) -> None:
    """vLLM answers with a line of text."""
    await exchange.respond(200, text.encode(), content_type=_TEXT)
