"""POST /v1/embed and /v2/embed, as Cohere has them: https://docs.cohere.com/reference/embed."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np

from penstock.engines.encoder.text import Vectors
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.pooling.embeddings import embed
from penstock.gateway.apis.pooling.endpoint import PoolingEndpoint, check_dimensions, written
from penstock.gateway.apis.pooling.schemas import (
    UNSUPPORTED,
    CohereEmbedRequest,
    CohereInput,
    EmbeddingRequest,
    EmbeddingType,
)
from penstock.gateway.apis.pooling.tokenizing import Cut
from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.models.language.sampling import bounded
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.settings import AppSettings

_READ = ("embedding_types", "priority")
"""Which the other routes refuse."""
_MOST = 2**31 - 1


class CohereErrors:
    """The error form of all paths of this API."""

    id_headers = (b"x-request-id",)

    def status(self, error: Exception) -> int:
        return wire_shape(error).status

    def body(self, error: Exception, request_id: str) -> bytes:
        return msgspec.json.encode({"id": request_id, "message": public_message(error)})

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return self.body(error, request_id)


COHERE_ERRORS = CohereErrors()


class CohereEmbed(PoolingEndpoint[CohereEmbedRequest]):
    schema = CohereEmbedRequest
    needs = ("embedding",)
    unsupported: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{name: neutral for name, neutral in UNSUPPORTED.items() if name not in _READ},
        "images": ("null", "[]"),
        **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), ("null",)),
    }

    def __init__(self, plane: PoolingPlane, settings: AppSettings, version: int) -> None:
        """`version` of the API, 1 or 2."""
        super().__init__(plane, settings)
        self._version = version

    async def answer(self, request: CohereEmbedRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        field, texts = _texts(request)
        check_dimensions(request.output_dimension, model, "output_dimension")
        if request.priority:
            context.ignore("priority", "requests of this route have the priority of their key")
        embedding = EmbeddingRequest(
            model=request.model,
            input=list(texts),
            dimensions=request.output_dimension,
            input_type=request.input_type,
        )
        vectors, tokenized = await embed(self.plane, model, embedding, context, _cut(request, model), field)
        kinds = request.embedding_types or (None if self._version == 1 else ["float"])
        write = partial(self._written, texts, vectors, kinds, sum(map(len, tokenized)))
        return await self.plane.in_pool(vectors.size * len(kinds or " "), write)

    def _written(
        self, texts: Sequence[str], vectors: Vectors, kinds: Sequence[EmbeddingType] | None, num_tokens: int
    ) -> bytes:
        """`kinds`: None for the first version's default form, a list of vectors."""
        embeddings = vectors.tolist() if kinds is None else {kind: _FORMS[kind](vectors) for kind in kinds}
        return msgspec.json.encode(
            {
                "id": str(uuid.uuid4()),
                "texts": texts,
                "embeddings": embeddings,
                "meta": {
                    "api_version": {"version": str(self._version)},
                    "billed_units": {"input_tokens": num_tokens},
                },
                "response_type": "embeddings_floats" if kinds is None else "embeddings_by_type",
            }
        )


def _texts(request: CohereEmbedRequest) -> tuple[str, list[str]]:
    """The field with the texts, and these. Raises InvalidRequestError, UnsupportedError."""
    if (request.texts is None) == (request.inputs is None):
        raise InvalidRequestError("Give texts, or inputs instead of it.", param="texts")
    if request.texts is not None:
        return "texts", request.texts
    return "inputs", [_text(item, f"inputs[{number}]") for number, item in enumerate(request.inputs or ())]


def _text(item: CohereInput, path: str) -> str:
    parts = []
    for number, part in enumerate(item.content):
        if part.type != "text" or part.text is None:
            field = f"{path}.content[{number}]"
            raise UnsupportedError(f"{field}: only parts of type text can be embedded.", param=field)
        parts.append(part.text)
    return "\n".join(parts)


def _cut(request: CohereEmbedRequest, model: PoolingModel) -> Cut:
    """Raises InvalidRequestError."""
    limit = model.source.info.max_tokens
    most = limit if request.max_tokens is None else bounded(request.max_tokens, "max_tokens", 1, _MOST)
    return Cut(
        most=min(limit, int(most)),
        allowed=request.truncate != "NONE",
        at_start=request.truncate == "START",
        way_out="truncate END or START",
    )


def _int8(vectors: Vectors) -> Any:
    """A vector's largest number becomes 127 or -127: its direction stays, which is what cosines compare."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    scaled = np.divide(vectors, largest, out=np.zeros_like(vectors), where=largest > 0)
    return np.rint(scaled * 127).astype(np.int16)


def _bits(vectors: Vectors) -> Any:
    """Eight numbers in a byte, the first in its highest bit: 1 for those above 0."""
    return np.packbits(vectors > 0, axis=1).astype(np.int16)


_FORMS: Mapping[EmbeddingType, Any] = {
    "float": lambda vectors: vectors.tolist(),
    "base64": lambda vectors: written(vectors, "base64"),
    "int8": lambda vectors: _int8(vectors).tolist(),
    "uint8": lambda vectors: (_int8(vectors) + 128).tolist(),
    "binary": lambda vectors: (_bits(vectors) - 128).tolist(),
    "ubinary": lambda vectors: _bits(vectors).tolist(),
}
