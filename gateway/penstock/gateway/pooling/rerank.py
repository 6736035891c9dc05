"""POST /rerank, /v1/rerank and /v2/rerank, in the forms of Jina and Cohere, and of Text Embeddings Inference (TEI)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.sampling import bounded
from penstock.gateway.pooling.answers import usage_object
from penstock.gateway.pooling.endpoint import PoolingEndpoint, check_count
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.pairs import Pairs, Scores, scores_of
from penstock.gateway.pooling.schemas import RerankRequest
from penstock.gateway.pooling.tei import tei_cut
from penstock.gateway.pooling.tokenizing import Cut, truncation

_MOST = 2**31 - 1


class Rerank(PoolingEndpoint[RerankRequest]):
    schema = RerankRequest
    needs = ("rerank", "embedding", "token_embedding")

    async def answer(self, request: RerankRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        field, texts = _documents(request)
        check_count(len(texts), field)
        top_n = len(texts) if not request.top_n else bounded(request.top_n, "top_n", 0, _MOST)
        pairs = Pairs(
            firsts=[request.query],
            seconds=texts,
            first_field="query",
            second_field=field,
            activate=request.use_activation is not False and not request.raw_scores,
        )
        scores, tokenized = await scores_of(self.plane, model, pairs, _cut(request, model), context)
        ranks = np.argsort(-scores, kind="stable")[:top_n].tolist()
        if request.texts is not None:
            return _tei_answer(texts, scores, ranks, return_text=bool(request.return_text))
        return _answer(request, request.model, texts, scores, ranks, tokenized)


def _documents(request: RerankRequest) -> tuple[str, list[str]]:
    """The field with the documents, and their texts. Raises InvalidRequestError."""
    if request.texts is None and request.documents is None:
        raise InvalidRequestError("Missing required parameter: documents.", param="documents")
    if request.texts is None:
        return "documents", [each if isinstance(each, str) else each.text for each in request.documents or ()]
    if request.documents is not None:
        raise InvalidRequestError("Give documents, or texts instead of it.", param="documents")
    return "texts", request.texts


def _cut(request: RerankRequest, model: PoolingModel) -> Cut:
    """Raises InvalidRequestError."""
    of_document = request.max_tokens_per_doc or None
    if of_document is not None:
        if model.head is None:
            raise InvalidRequestError("max_tokens_per_doc needs a model that scores pairs.", param="max_tokens_per_doc")
        bounded(of_document, "max_tokens_per_doc", 1, _MOST)
    if request.texts is None or request.truncate_prompt_tokens is not None:
        return truncation(request, model, of_document)
    return tei_cut(request.truncate, request.truncation_direction, model, of_document)


def _answer(
    request: RerankRequest,
    name: str,
    texts: Sequence[str],
    scores: Scores,
    ranks: Sequence[int],
    tokenized: Sequence[TokenizedText],
) -> bytes:
    results = []
    for index in ranks:
        document = {} if request.return_documents is False else {"document": {"text": texts[index]}}
        results.append({"index": index, "relevance_score": float(scores[index])} | document)
    return msgspec.json.encode(
        {"id": f"rerank-{uuid.uuid4().hex}", "model": name, "usage": usage_object(tokenized), "results": results}
    )


def _tei_answer(texts: Sequence[str], scores: Scores, ranks: Sequence[int], *, return_text: bool) -> bytes:
    return msgspec.json.encode(
        [
            {"index": index, "score": float(scores[index])} | ({"text": texts[index]} if return_text else {})
            for index in ranks
        ]
    )
