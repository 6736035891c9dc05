"""POST /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.gateway.front.context import RequestContext
from penstock.gateway.ollama.names import model_name
from penstock.gateway.ollama.schemas import EmbedRequest, OldEmbedRequest
from penstock.gateway.pooling.embeddings import embed
from penstock.gateway.pooling.endpoint import PoolingEndpoint
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.pooling.schemas import EmbeddingRequest

_CUT_WHAT_IS_TOO_LONG = -1
"""As `truncate_prompt_tokens`: Ollama's default."""


class Embed(PoolingEndpoint[EmbedRequest]):
    schema = EmbedRequest

    async def answer(self, request: EmbedRequest, context: RequestContext) -> bytes:
        cut = None if request.truncate is False else _CUT_WHAT_IS_TOO_LONG
        asked = EmbeddingRequest(
            model=request.model,
            input=request.input,
            dimensions=request.dimensions,
            truncate_prompt_tokens=cut,
        )
        vectors, texts = await _embedded(self.plane, asked, context)
        body = {
            "model": request.model,
            "embeddings": vectors.tolist(),
            "total_duration": round((time.monotonic() - context.arrival) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, texts)),
        }
        return await self.plane.in_pool(vectors.size, lambda: msgspec.json.encode(body))


class OldEmbed(PoolingEndpoint[OldEmbedRequest]):
    schema = OldEmbedRequest

    async def answer(self, request: OldEmbedRequest, context: RequestContext) -> bytes:
        asked = EmbeddingRequest(
            model=request.model, input=request.prompt, truncate_prompt_tokens=_CUT_WHAT_IS_TOO_LONG
        )
        vectors, _ = await _embedded(self.plane, asked, context)
        return msgspec.json.encode({"embedding": vectors[0].tolist()})


async def _embedded(
    plane: PoolingPlane, asked: EmbeddingRequest, context: RequestContext
) -> tuple[Vectors, Sequence[TokenizedText]]:
    known = dict(plane.loaded_names())
    asked.model = model_name(asked.model, known.__contains__)
    return await embed(plane, plane.model(asked.model, context), asked, context)
