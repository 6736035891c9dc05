"""A model whose responses are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic_ns

from penstock.classic.base import InferModel, ResponseStream, SaysReady, says_ready
from penstock.classic.batching.responses import OneResponse
from penstock.classic.caching.cache import CachedResponse, ResponseCache, tensor_bytes
from penstock.classic.caching.keys import response_key
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import Tensor

_LARGE = 1 << 20
"""Bytes of tensors from which hashing or copying them is left to a thread."""


class CachedModel(SaysReady):
    """Implements InferModel in front of another one that is not decoupled: a request whose inputs the cache knows is
    answered at once, without a queue. `identity` is part of the key of each response (`keys.py`)."""

    def __init__(self, model: InferModel, cache: ResponseCache, identity: Callable[[], bytes]) -> None:
        self._model = model
        self._cache = cache
        self._identity = identity

    @property
    def uncached(self) -> InferModel:
        """The model behind the cache."""
        return self._model

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def version(self) -> int:
        return self._model.version

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def signature(self) -> ModelSignature:
        return self._model.signature

    @property
    def ready(self) -> bool:
        return self._model.ready

    @property
    def says_ready(self) -> bool:
        return says_ready(self._model)

    @property
    def takes_infer(self) -> bool:
        return self._model.takes_infer

    @property
    def model_folder(self) -> Path | None:
        return self._model.model_folder

    @property
    def statistics(self) -> ModelStatistics:
        return self._model.statistics

    async def infer(self, request: InferRequest) -> InferResponse:
        if request.correlation_id or request.sequence_start or request.sequence_end:
            # a model, or a step of an ensemble, may answer by what the sequence has been so far
            return await self._model.infer(request)
        started = monotonic_ns()
        key = await self._key(request)
        found = await self._cache.lookup(key)
        looked_up = monotonic_ns()
        if found is not None:
            self.statistics.answered_from_cache(looked_up - started)
            return found.response()
        response = await self._model.infer(request)
        inserting = monotonic_ns()
        await self._cache.insert(key, await _copied(response))
        self.statistics.missed_by_cache(looked_up - started + monotonic_ns() - inserting)
        return response

    def stream(self, request: InferRequest) -> ResponseStream:
        return OneResponse(asyncio.ensure_future(self.infer(request)))

    async def stop(self) -> None:
        await self._model.stop()

    async def _key(self, request: InferRequest) -> bytes:
        identity = self._identity()
        if _are_large(request.inputs.values()):
            return await asyncio.to_thread(response_key, identity, request)
        return response_key(identity, request)


def uncached(model: InferModel) -> InferModel:
    """The model itself, where there is a cache in front of it."""
    return model.uncached if isinstance(model, CachedModel) else model


async def _copied(response: InferResponse) -> CachedResponse:
    if _are_large(response.outputs or ()):
        return await asyncio.to_thread(CachedResponse.of, response)
    return CachedResponse.of(response)


def _are_large(tensors: Collection[Tensor]) -> bool:
    """Texts are only counted where there are few of them."""
    return any(each.array.nbytes >= _LARGE for each in tensors) or sum(map(tensor_bytes, tensors)) >= _LARGE
