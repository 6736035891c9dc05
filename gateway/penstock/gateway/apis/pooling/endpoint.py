"""The way of a call: body, request, answer."""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, Generic, TypeVar

import msgspec
import numpy as np

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.pooling.schemas import UNSUPPORTED, PoolingRequest
from penstock.gateway.generating.request_reading import JsonBody, RequestReader, default_model, parse
from penstock.gateway.models.entries import Kind
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def usage_object(texts: Sequence[TokenizedText]) -> PoolingUsage:
    total = sum(map(len, texts))
    return PoolingUsage(total, total)


def list_object(prefix: str, model: str, data: object, texts: Sequence[TokenizedText]) -> bytes:
    """The answer of every route but rerank."""
    return msgspec.json.encode(
        {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage_object(texts),
        }
    )


def check_dimensions(dimensions: int | None, model: PoolingModel, field: str = "dimensions") -> None:
    """Raises InvalidRequestError for a length that the model's vectors cannot be cut to."""
    if dimensions is None:
        return
    size = model.source.info.output_size
    trained = model.dimensions
    if trained and dimensions not in (*trained, size):
        shown = ", ".join(map(str, sorted({*trained, size})))
        raise InvalidRequestError(f"{field}: this model's vectors may have {shown}.", param=field)
    if not 1 <= dimensions <= size:
        raise InvalidRequestError(f"{field} must be between 1 and {size}.", param=field)


def finished(vectors: Vectors, dimensions: int | None, *, normalize: bool) -> Vectors:
    """Cut to their first `dimensions` numbers, then scaled to length 1."""
    cut = vectors[:, :dimensions]
    if not normalize:
        return cut
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    scaled: Vectors = np.divide(cut, lengths, out=np.zeros_like(cut), where=lengths > 0)
    return scaled


def written(vectors: Vectors, encoding_format: str | None) -> list[str] | list[list[float]]:
    if encoding_format != "base64":
        rows: list[list[float]] = vectors.tolist()
        return rows
    little = np.ascontiguousarray(vectors, "<f4")
    return [base64.b64encode(row).decode() for row in little]


MAX_INPUTS = 2048
"""Of a call, as at OpenAI."""
_R = TypeVar("_R", bound=PoolingRequest)


def check_count(count: int, param: str) -> None:
    """Raises InvalidRequestError."""
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequestError(f"{param}: 1 to {MAX_INPUTS} texts are allowed, not {count}.", param=param)


class PoolingEndpoint(ABC, Generic[_R]):
    schema: ClassVar[type[PoolingRequest]]
    unsupported: ClassVar[Mapping[str, tuple[str, ...]]] = UNSUPPORTED
    needs: ClassVar[Sequence[str]] = ()
    """Capabilities that answer, the best first; empty: all do. A request without a model gets the only one that has
    one."""
    kind: ClassVar[Kind] = Kind.SCORES
    """What its requests need of a model."""

    def __init__(self, plane: PoolingPlane, settings: AppSettings) -> None:
        self.plane = plane
        self._settings = settings
        passed = self.kind if self.kind.api else None
        self._reader = RequestReader(plane.models, self._parse, attrgetter("model"), self._default_model, passed)

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            call.watch()
            request = await self._reader.read(exchange, body)
            if request is None:
                return
            exchange.read_deadline()
            await exchange.respond(200, await self.answer(request, exchange.context))

    def _parse(self, body: JsonBody) -> PoolingRequest:
        return parse(body, self.schema, self.unsupported)

    def _default_model(self, context: RequestContext) -> str:
        return default_model(self._settings, context, self.plane.models, self.kind, self.needs)

    @abstractmethod
    async def answer(self, request: _R, context: RequestContext) -> bytes:
        """Raises PenstockError."""
