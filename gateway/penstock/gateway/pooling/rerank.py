"""POST /rerank, /v1/rerank and /v2/rerank, in the forms of Jina and Cohere."""

from __future__ import annotations

import uuid

import msgspec
import numpy as np

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.sampling import bounded
from penstock.gateway.pooling.answers import usage_object
from penstock.gateway.pooling.endpoint import PoolingEndpoint, check_count
from penstock.gateway.pooling.pairs import Pairs, scores_of
from penstock.gateway.pooling.schemas import RerankRequest
from penstock.gateway.pooling.tokenizing import truncation

_MOST = 2**31 - 1


class Rerank(PoolingEndpoint[RerankRequest]):
    schema = RerankRequest

    async def answer(self, request: RerankRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        check_count(len(request.documents), "documents")
        texts = [each if isinstance(each, str) else each.text for each in request.documents]
        top_n = len(texts) if not request.top_n else bounded(request.top_n, "top_n", 0, _MOST)
        of_document = request.max_tokens_per_doc
        if of_document is not None:
            if model.head is None:
                raise InvalidRequestError(
                    "max_tokens_per_doc needs a model that scores pairs.", param="max_tokens_per_doc"
                )
            bounded(of_document, "max_tokens_per_doc", 1, _MOST)
        pairs = Pairs(
            firsts=[request.query],
            seconds=texts,
            first_field="query",
            second_field="documents",
            activate=request.use_activation is not False,
        )
        cut = truncation(request.truncate_prompt_tokens, model, of_document)
        scores, tokenized = await scores_of(self.plane, model, pairs, cut, context)
        results = []
        for index in np.argsort(-scores, kind="stable")[:top_n].tolist():
            document = {} if request.return_documents is False else {"document": {"text": texts[index]}}
            results.append({"index": index, "relevance_score": float(scores[index])} | document)
        return msgspec.json.encode(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": request.model,
                "usage": usage_object(tokenized),
                "results": results,
            }
        )
