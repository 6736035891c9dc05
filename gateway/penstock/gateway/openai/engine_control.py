"""POST /sleep, /wake_up and /reset_prefix_cache, and GET /is_sleeping, as vLLM's server has them.

Each acts on all language models, or on the one that `?model=` names.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.models import LoadedModel

_LEVELS = ("1", "2")
_MODES = ("abort", "wait")


class _Control(ABC):
    takes: tuple[str, ...] = ()
    """Names in the query, beside `model`."""

    @property
    def query(self) -> tuple[str, ...]:
        return ("model", *self.takes)

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        query = dict(Request(exchange.scope).query_params)
        for name in query.keys() - {"model", *self.takes}:
            raise InvalidRequestError(f"{name[:64]} is not supported here.", param=name[:64])
        if "model" in query:
            exchange.context.principal.require_model(query["model"])
            models = [self._dataplane.models.find(query["model"])[0]]
        else:
            models = [model for _, model in self._dataplane.models.loaded()]
        with exchange.call() as call:
            call.watch()
            await exchange.respond(200, await self._answer(models, query))

    @abstractmethod
    async def _answer(self, models: Sequence[LoadedModel], query: dict[str, str]) -> bytes: ...


class ResetPrefixCache(_Control):
    async def _answer(self, models: Sequence[LoadedModel], query: dict[str, str]) -> bytes:
        for model in models:
            if not model.sleep.asleep:  # else there is nothing left to forget
                await model.engine.reset_prefix_cache()
        return b""


class Sleep(_Control):
    takes = ("level", "mode")

    async def _answer(self, models: Sequence[LoadedModel], query: dict[str, str]) -> bytes:
        level, mode = query.get("level", "1"), query.get("mode", "abort")
        if level not in _LEVELS:
            raise InvalidRequestError("level must be 1 or 2.", param="level")
        if mode not in _MODES:
            raise InvalidRequestError("mode must be abort or wait.", param="mode")
        await asyncio.gather(*(model.sleep.sleep(wait=mode == "wait") for model in models))
        return b""


class WakeUp(_Control):
    async def _answer(self, models: Sequence[LoadedModel], query: dict[str, str]) -> bytes:
        for model in models:  # one after the other: each finds out what the others leave of the memory
            await model.sleep.wake()
        return b""


class IsSleeping(_Control):
    async def _answer(self, models: Sequence[LoadedModel], query: dict[str, str]) -> bytes:
        return msgspec.json.encode({"is_sleeping": bool(models) and all(model.sleep.asleep for model in models)})
