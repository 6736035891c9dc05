"""POST /v1/responses/input_tokens."""

from __future__ import annotations

import msgspec

from penstock.gateway.http.exchange import Exchange
from penstock.gateway.responses.asked import Asked
from penstock.gateway.responses.create import CreateResponse


class InputTokens(CreateResponse):
    """How long the prompt of a response would be. It takes what `/v1/responses` takes, and makes nothing."""

    async def _for_own_model(self, exchange: Exchange, asked: Asked) -> Asked:
        """Models of other servers are refused as unknown here: that takes their tokenizer."""
        return asked

    async def _answer_at_once(self, exchange: Exchange, asked: Asked) -> bool:
        wanted = await self._generate_request(asked, exchange.context)
        count = {"object": "response.input_tokens", "input_tokens": len(wanted.prompts[0])}
        await exchange.respond(200, msgspec.json.encode(count))
        return True
