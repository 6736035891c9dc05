"""POST /score and /v1/score, as in vLLM."""

from __future__ import annotations

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.pooling.answers import list_object
from penstock.gateway.pooling.endpoint import PoolingEndpoint, check_count
from penstock.gateway.pooling.pairs import Pairs, scores_of
from penstock.gateway.pooling.schemas import ScoreRequest
from penstock.gateway.pooling.tokenizing import truncation


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
    given = {each: getattr(request, each) for each in (name, *other_names) if getattr(request, each) is not None}
    if len(given) != 1:
        raise InvalidRequestError(f"Give {name}, or {' or '.join(other_names)} instead of it.", param=name)
    [(name, texts)] = given.items()
    return name, [texts] if isinstance(texts, str) else texts
