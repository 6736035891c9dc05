"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's server has them."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.engines.errors import UnsupportedError
from penstock.gateway.errors import HttpError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.http.exchange import Exchange
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


async def load_adapter(adapters: AdapterControl, settings: AppSettings, exchange: Exchange) -> None:
    with exchange.call() as call:
        request = await _read(exchange, adapters, settings, LoadRequest)
        if request.is_3d_lora_weight:
            raise UnsupportedError("is_3d_lora_weight is not supported.", param="is_3d_lora_weight")
        call.watch()
        await adapters.load(
            request.lora_name, request.lora_path, base=request.base_model_name, replace=request.load_inplace
        )
        await _say(exchange, f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_adapter(adapters: AdapterControl, settings: AppSettings, exchange: Exchange) -> None:
    with exchange.call() as call:
        request = await _read(exchange, adapters, settings, UnloadRequest)
        call.watch()
        await adapters.unload(request.lora_name)
        await _say(exchange, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


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
