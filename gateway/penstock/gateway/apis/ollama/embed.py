"""POST /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

import time

import msgspec

from penstock.gateway.apis.ollama.answers import LOADED_BEFORE
from penstock.gateway.apis.ollama.schemas import EmbedRequest, OldEmbedRequest, model_name
from penstock.gateway.apis.pooling.embeddings import embed, require_one_vector
from penstock.gateway.apis.pooling.endpoint import PoolingEndpoint
from penstock.gateway.apis.pooling.schemas import EmbeddingRequest
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext

_CUT_WHAT_IS_TOO_LONG = -1
"""As `truncate_prompt_tokens`: Ollama's default."""


class Embed(PoolingEndpoint[EmbedRequest]):
    schema = EmbedRequest
    needs = ("embedding",)

    async def answer(self, request: EmbedRequest, context: RequestContext) -> bytes:
        cut = None if request.truncate is False else _CUT_WHAT_IS_TOO_LONG
        embedding = EmbeddingRequest(
            model=request.model,
            input=request.input,
            dimensions=request.dimensions or None,
            truncate_prompt_tokens=cut,
        )
        rows, tokens = await _embedded(self.plane, embedding, context)
        body = {
            "model": request.model,
            "embeddings": rows,
            "total_duration": round((time.monotonic() - context.arrival) * 1e9),
            "load_duration": LOADED_BEFORE,
            "prompt_eval_count": tokens,
        }
        return await self.plane.in_pool(sum(map(len, rows)), lambda: msgspec.json.encode(body))


class OldEmbed(PoolingEndpoint[OldEmbedRequest]):
    schema = OldEmbedRequest
    needs = ("embedding",)

    async def answer(self, request: OldEmbedRequest, context: RequestContext) -> bytes:
        embedding = EmbeddingRequest(
            model=request.model, input=request.prompt, truncate_prompt_tokens=_CUT_WHAT_IS_TOO_LONG
        )
        rows, _ = await _embedded(self.plane, embedding, context)
        return msgspec.json.encode({"embedding": rows[0] if rows else []})


async def _embedded(
    plane: PoolingPlane, embedding: EmbeddingRequest, context: RequestContext
) -> tuple[list[list[float]], int]:
    """Vectors, and how many tokens were read. Without a text, which only asks whether the model is there, none."""
    embedding.model = model_name(embedding.model, plane.models.__contains__)
    model = plane.model(embedding.model, context)
    if not embedding.input:
        require_one_vector(model)
        return [], 0
    vectors, texts = await embed(plane, model, embedding, context)
    return vectors.tolist(), sum(map(len, texts))
