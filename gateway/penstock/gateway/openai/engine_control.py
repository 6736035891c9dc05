"""POST /sleep, /wake_up and /reset_prefix_cache, and GET /is_sleeping, as vLLM's server has them.

Each acts on all language models, or on the one that `?model=` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.models import LoadedModel

_LEVELS = ("1", "2")
_MODES = ("abort", "wait")

Act = Callable[[Sequence[LoadedModel], Mapping[str, str]], Awaitable[bytes]]
"""What is done to models, as the query says. Gives the answer's body. Raises PenstockError."""


async def control(dataplane: DataPlane, act: Act, takes: Sequence[str], exchange: Exchange) -> None:
    """`takes`: names in the query."""
    query = dict(exchange.query)
    for name in query.keys() - set(takes):
        raise InvalidRequestError(f"{name[:64]} is not supported here.", param=name[:64])
    if "model" in query:
        exchange.context.principal.require_model(query["model"])
        models = [dataplane.models.find(query["model"])[0]]
    else:
        models = [model for _, model in dataplane.models.loaded()]
    with exchange.call() as call:
        call.watch()
        await exchange.respond(200, await act(models, query))


async def reset_prefix_cache(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    for model in models:
        if not model.sleep.asleep:  # else there is nothing left to forget
            await model.engine.reset_prefix_cache()
    return b""


async def sleep(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    level, mode = query.get("level", "1"), query.get("mode", "abort")
    if level not in _LEVELS:
        raise InvalidRequestError("level must be 1 or 2.", param="level")
    if mode not in _MODES:
        raise InvalidRequestError("mode must be abort or wait.", param="mode")
    await asyncio.gather(*(model.sleep.sleep(wait=mode == "wait") for model in models))
    return b""


async def wake_up(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    for model in models:  # one after the other: each finds out what the others leave of the memory
        await model.sleep.wake()
    return b""


async def is_sleeping(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    return msgspec.json.encode({"is_sleeping": bool(models) and all(model.sleep.asleep for model in models)})
