"""A model whose responses are kept, and the keys: what an answer depends on, as a hash that nobody can make collide
(SHA-256).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from hashlib import file_digest, sha256
from pathlib import Path
from time import monotonic_ns
from uuid import uuid4
from weakref import WeakKeyDictionary

from penstock.classic.base import InferModel, ModelContext, ResponseStream, SaysReady, says_ready
from penstock.classic.batching.responses import OneResponse
from penstock.classic.caching.cache import CachedResponse, ResponseCache, tensor_bytes
from penstock.classic.ensemble.model import EnsembleModel
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import TooManyFilesError, files_below
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import Tensor, to_buffer


def response_key(identity: bytes, request: InferRequest) -> bytes:
    """`identity` names the model version. The rest is the caller's tenant, inputs, requested outputs and parameters,
    each behind its length, so that no two requests give the same bytes. The request's id, priority and times are not
    part of it."""
    digest = sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    add(identity)
    add(request.tenant.encode())
    add(repr(request.outputs).encode())
    add(repr(sorted(request.parameters.items())).encode())
    for name, tensor in sorted(request.inputs.items()):
        add(name.encode())
        add(f"{tensor.datatype} {tensor.array.shape}".encode())
        add(to_buffer(tensor))
    return digest.digest()


def loaded_identity() -> bytes:
    """Of a model version as it is loaded now. Loaded again, it has another one, so nothing stale is ever found."""
    return uuid4().bytes


def content_identity(context: ModelContext) -> bytes:
    """The same for the same name, version, configuration and files, on any server; that of this load alone where the
    model's links lead to too many files. In a thread: it reads files."""
    digest = sha256(f"{context.name}/{context.version}\n".encode())
    digest.update(context.config.SerializeToString(deterministic=True))
    places = (place for place in context.model_folder.iterdir() if not _is_another_version(place, context.version))
    try:
        for path in files_below(places):
            digest.update(f"\n{path.relative_to(context.model_folder)}\n".encode())
            with path.open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
    except TooManyFilesError:
        return loaded_identity()
    return digest.digest()


def _is_another_version(place: Path, version: int) -> bool:
    return place.name.isdigit() and place.name != str(version)


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
        cached = await self._cache.lookup(key)
        looked_up = monotonic_ns()
        if cached is not None:
            self.statistics.answered_from_cache(looked_up - started)
            return cached.response()
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
    return any(tensor.array.nbytes >= _LARGE for tensor in tensors) or sum(map(tensor_bytes, tensors)) >= _LARGE


class EnsembleIdentity:
    """Is another one as soon as one of the models, at any depth, has been loaded again."""

    def __init__(self, ensemble: EnsembleModel) -> None:
        self._ensemble = ensemble
        self._known: WeakKeyDictionary[InferModel, bytes] = WeakKeyDictionary()

    def __call__(self) -> bytes:
        """Raises PenstockError when a model is gone."""
        return b"".join(self._parts(self._ensemble))

    def _parts(self, model: InferModel) -> list[bytes]:
        parts = [self._known.setdefault(model, uuid4().bytes)]
        if isinstance(model, EnsembleModel):
            for part in model.step_models().values():
                parts += self._parts(uncached(part))
        return parts
