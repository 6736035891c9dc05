"""Ollama's library of models: /api/pull of a model that is there, and what the operator alone does."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import ModelNotFoundError, UnsupportedError
from penstock.gateway.generating.bodies import parse
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.ollama.models import Models, named_model
from penstock.gateway.ollama.names import model_name
from penstock.gateway.ollama.schemas import PullRequest

_JSON_LINES = b"application/x-ndjson"
_encode = msgspec.json.Encoder().encode


class Pull:
    """POST /api/pull. Clients ask for a model before they use it: for one that is here, all is done already."""

    schema = PullRequest

    def __init__(self, models: Models, settings: AppSettings) -> None:
        self._models = models
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        request = parse(await exchange.body(self._settings.max_body_bytes, from_curl=True), PullRequest, {})
        states = await self._states(named_model(request), exchange)
        if request.stream is False:
            await exchange.respond(200, _encode(states[-1]))
        else:
            body = b"".join(_encode(state) + b"\n" for state in states)
            await exchange.respond(200, body, content_type=_JSON_LINES)

    async def _states(self, tagged_name: str, exchange: Exchange) -> list[dict[str, Any]]:
        """Raises ModelNotFoundError, NotReadyError, PermissionDeniedError."""
        upstream = self._settings.text_models.listed()
        name = model_name(tagged_name, upstream.__contains__)
        layers = []
        if name in upstream:
            exchange.context.principal.require_model(name)
        else:
            layers = await self._layers(tagged_name, exchange)
        texts = ("verifying sha256 digest", "writing manifest", "success")
        return [{"status": "pulling manifest"}, *layers, *({"status": text} for text in texts)]

    async def _layers(self, tagged_name: str, exchange: Exchange) -> list[dict[str, Any]]:
        """None while the size is not known: clients divide by it."""
        try:
            entry = await self._models.entry(tagged_name, exchange)
        except ModelNotFoundError:
            message = (
                "pull model manifest: file does not exist. The models of this server are those of GET /api/tags: its "
                "operator downloads others (`penstock pull`), and no request does."
            )
            raise ModelNotFoundError(message, param="model") from None
        digest, size = entry["digest"], entry["size"]
        if not size:
            return []
        return [{"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": size, "completed": size}]


class OperatorsOnly:
    """/api/create, /api/copy, /api/delete and /api/push: models are the operator's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise UnsupportedError(
            "The models of this server are chosen by its operator, and no request creates, copies, deletes or pushes "
            "them: start it with `penstock serve MODEL` or a model repository."
        )
