"""POST /embed, as Text Embeddings Inference (TEI) has it, and how TEI cuts long texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from penstock.gateway.front.context import RequestContext
from penstock.gateway.pooling.embeddings import embed
from penstock.gateway.pooling.endpoint import PoolingEndpoint
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.schemas import UNSUPPORTED, Direction, EmbeddingRequest, TeiEmbedRequest
from penstock.gateway.pooling.tokenizing import Cut


class TeiEmbed(PoolingEndpoint[TeiEmbedRequest]):
    schema = TeiEmbedRequest
    needs = ("embedding",)
    unsupported: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), ("null",)),
    }

    async def answer(self, request: TeiEmbedRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        embedding = EmbeddingRequest(
            model=model.names[0],
            input=request.inputs,
            dimensions=request.dimensions,
            prompt_name=request.prompt_name,
            normalize=request.normalize is not False,
        )
        cut = tei_cut(request.truncate, request.truncation_direction, model)
        vectors, _ = await embed(self.plane, model, embedding, context, cut, "inputs")
        return await self.plane.in_pool(vectors.size, lambda: msgspec.json.encode(vectors.tolist()))


def tei_cut(
    truncate: bool | None, direction: Direction | None, model: PoolingModel, of_second: int | None = None
) -> Cut:
    """As the fields `truncate` and `truncation_direction` say; by default long texts are cut, as TEI does it."""
    return Cut(
        most=model.source.info.max_tokens,
        allowed=truncate is not False,
        of_second=of_second,
        at_start=direction in ("Left", "left"),
        way_out="truncate",
    )
