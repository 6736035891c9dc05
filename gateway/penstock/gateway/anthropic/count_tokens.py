"""POST /v1/messages/count_tokens."""

from __future__ import annotations

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.anthropic.chat import read_chat
from penstock.gateway.anthropic.schemas import CountTokensRequest
from penstock.gateway.anthropic.unsupported import UNSUPPORTED
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.default_model import language_model, no_model, with_model
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane


class CountTokens:
    """How long the prompt of a message would be."""

    def __init__(self, dataplane: DataPlane, settings: AppSettings) -> None:
        self._dataplane = dataplane
        self._settings = settings

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            request = self._parsed(body, exchange.context)
            call.watch()
            exchange.read_deadline()
            await self._dataplane.models.load_on_demand(request.model, exchange.context)
            model = self._dataplane.model(request.model, exchange.context)
            chat, _ = read_chat(request, model, exchange.context)
            prompt = await chat.prompt(self._dataplane, exchange.context)
            await exchange.respond(200, msgspec.json.encode({"input_tokens": len(prompt.token_ids)}))

    def _parsed(self, body: bytes, context: RequestContext) -> CountTokensRequest:
        """Raises InvalidRequestError, UnsupportedError."""
        try:
            request = parse(body, CountTokensRequest, UNSUPPORTED)
            if not request.model:
                raise no_model()
        except InvalidRequestError as error:
            models = self._dataplane.models
            named = with_model(body, error, context, lambda: language_model(self._settings, context, models))
            return parse(named, CountTokensRequest, UNSUPPORTED)
        return request
