"""Scores of pairs: POST /rerank in the forms of Jina and Cohere, and of Text Embeddings Inference (TEI), and /score as
in vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.pooling.embeddings import require_one_vector, tei_cut
from penstock.gateway.apis.pooling.endpoint import PoolingEndpoint, check_count, finished, list_object, usage_object
from penstock.gateway.apis.pooling.schemas import RerankRequest, ScoreRequest
from penstock.gateway.apis.pooling.tokenizing import Cut, tokenize_inputs, tokenize_pairs, truncation
from penstock.gateway.models.language.sampling import bounded
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    firsts: Sequence[str]
    """One for all of the others, or as many."""
    seconds: Sequence[str]
    first_field: str
    """As errors name them."""
    second_field: str
    activate: bool
    """Scores as the model's files want them; else logits."""

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.firsts)) + sum(map(len, self.seconds))


Scores = npt.NDArray[np.float32]


async def scores_of(
    plane: PoolingPlane, model: PoolingModel, pairs: Pairs, cut: Cut, context: RequestContext
) -> tuple[Scores, Sequence[TokenizedText]]:
    """One for each of `pairs.seconds`. Raises PenstockError."""
    require_one_vector(model)
    if model.head is None:
        return await _angles(plane, model, pairs, cut, context)
    if len(model.head.labels) != 1:
        raise InvalidRequestError(
            f"The model `{model.names[0]}` has {len(model.head.labels)} classes and no score; see /v1/classify.",
            param="model",
        )
    tokenize = partial(tokenize_pairs, model, pairs.firsts, pairs.seconds, cut, pairs.second_field)
    logits, texts = await plane.rows(model, tokenize, pairs.num_chars, context)
    rows = model.head.activate(logits) if pairs.activate else logits
    return rows[:, 0], texts


async def _angles(
    plane: PoolingPlane, model: PoolingModel, pairs: Pairs, cut: Cut, context: RequestContext
) -> tuple[Scores, Sequence[TokenizedText]]:
    """Cosines, with the prompts that sentence-transformers puts before queries and documents."""

    def tokenize() -> list[TokenizedText]:
        recipe = model.recipe
        tokenized: list[TokenizedText] = []
        for kind, param, texts in (
            ("query", pairs.first_field, pairs.firsts),
            ("document", pairs.second_field, pairs.seconds),
        ):
            prompt = recipe.prompts.get(kind, recipe.default_prompt)
            tokenized += tokenize_inputs(model, texts, cut, prompt=prompt, add_special_tokens=True, param=param)
        return tokenized

    rows, texts = await plane.rows(model, tokenize, pairs.num_chars, context)
    vectors = finished(rows, None, normalize=True)
    cosines: Scores = (vectors[: len(pairs.firsts)] * vectors[len(pairs.firsts) :]).sum(axis=1)
    return cosines, texts


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
        return "documents", [
            document if isinstance(document, str) else document.text for document in request.documents or ()
        ]
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


class Score(PoolingEndpoint[ScoreRequest]):
    schema = ScoreRequest
    needs = ("score", "embedding", "token_embedding")

    async def answer(self, request: ScoreRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        pairs = _pairs(request)
        cut = truncation(request, model)
        scores, texts = await scores_of(self.plane, model, pairs, cut, context)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())]
        return list_object("score", request.model, data, texts)


def _pairs(request: ScoreRequest) -> Pairs:
    """Raises InvalidRequestError."""
    first_field, firsts = _one_of(request, "text_1", "queries", "data_1")
    second_field, seconds = _one_of(request, "text_2", "documents", "items", "data_2")
    check_count(len(seconds), second_field)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"{first_field} must be one text, or as many as {second_field}: there are {len(firsts)} and "
            f"{len(seconds)}.",
            param=first_field,
        )
    return Pairs(
        firsts=firsts,
        seconds=seconds,
        first_field=first_field,
        second_field=second_field,
        activate=request.use_activation is not False,
    )


def _one_of(request: ScoreRequest, name: str, *other_names: str) -> tuple[str, list[str]]:
    """What the request has under one of these names. Raises InvalidRequestError unless it is exactly one."""
    fields = {field: getattr(request, field) for field in (name, *other_names) if getattr(request, field) is not None}
    if len(fields) != 1:
        raise InvalidRequestError(f"Give {name}, or {' or '.join(other_names)} instead of it.", param=name)
    [(name, texts)] = fields.items()
    return name, [texts] if isinstance(texts, str) else texts
