"""Routes of embeddings, ranking and classification. Several have the paths of more than one other server."""

from __future__ import annotations

from typing import Any

from penstock.gateway.apis.pooling.cohere import COHERE_ERRORS, CohereEmbed
from penstock.gateway.apis.pooling.embeddings import Embeddings, TeiEmbed
from penstock.gateway.apis.pooling.endpoint import PoolingEndpoint
from penstock.gateway.apis.pooling.pooling import Classify, Pooling
from penstock.gateway.apis.pooling.rerank import Rerank, Score
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.access import INFER
from penstock.gateway.transports.http.routes import OPENAI, Api, Route
from penstock.gateway.transports.http.settings import AppSettings

_RANKING = Api("ranking")
_COHERE = Api("ranking", COHERE_ERRORS)


def pooling_routes(pooling: PoolingPlane, settings: AppSettings) -> list[Route]:
    rerank, score, classify = Rerank(pooling, settings), Score(pooling, settings), Classify(pooling, settings)
    rows: tuple[tuple[str, PoolingEndpoint[Any], Api], ...] = (
        ("/v1/embeddings", Embeddings(pooling, settings), OPENAI),
        *((path, rerank, _RANKING) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *((path, score, _RANKING) for path in ("/score", "/v1/score")),
        *((path, classify, _RANKING) for path in ("/classify", "/v1/classify")),
        ("/pooling", Pooling(pooling, settings), _RANKING),
        ("/embed", TeiEmbed(pooling, settings), _RANKING),
        ("/v1/embed", CohereEmbed(pooling, settings, 1), _COHERE),
        ("/v2/embed", CohereEmbed(pooling, settings, 2), _COHERE),
    )
    return [
        Route("POST", path, INFER, endpoint.handle, api, schema=endpoint.schema, refused=endpoint.unsupported)
        for path, endpoint, api in rows
    ]
