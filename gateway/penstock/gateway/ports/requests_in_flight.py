"""GET /debug/requests: every request that has not ended, the oldest first."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange

_LIMIT, _MAX_LIMIT = 200, 10_000


class RequestsInFlight:
    """`?limit=` bounds what is shown, `?tenant=` and `?model=` choose. Never prompts."""

    def __init__(self, journal: RequestJournal) -> None:
        self._journal = journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises InvalidRequestError."""
        exchange: Exchange = scope[SCOPE_KEY]
        query = Request(scope).query_params
        limit = _limit(query.get("limit"))
        tenant, model = query.get("tenant"), query.get("model")
        in_flight = [context for context in self._journal.in_flight() if context is not exchange.context]
        chosen = [
            context
            for context in in_flight
            if tenant in (None, context.tenant) and model in (None, context.record.model)
        ]
        now = time.monotonic()
        shown = [_shown(context, now) for context in chosen[:limit]]
        body = {"in_flight": len(in_flight), "chosen": len(chosen), "requests": shown}
        await exchange.respond(200, msgspec.json.encode(body))


def _limit(given: str | None) -> int:
    if given is None:
        return _LIMIT
    if not given.isascii() or not given.isdigit() or len(given) > 5 or not 1 <= int(given) <= _MAX_LIMIT:
        raise InvalidRequestError(f"limit must be a number from 1 to {_MAX_LIMIT}.", param="limit")
    return int(given)


def _shown(context: RequestContext, now: float) -> dict[str, object]:
    record, usage = context.record, context.record.usage
    shown: dict[str, object] = {
        "id": context.id,
        "tenant": context.tenant,
        "protocol": record.protocol,
        "route": record.route,
        "model": record.model,
        "stage": record.stage.value,
        "stage_seconds": round(now - record.stage_since, 3),
        "seconds": round(now - context.arrival, 3),
        "deadline_in_seconds": None if context.deadline is None else round(context.deadline - now, 3),
        "bytes_in": record.bytes_in,
    }
    if record.target:
        shown["target"] = record.target
    if usage is not None:
        shown["prompt_tokens"] = usage.prompt_tokens
        shown["completion_tokens"] = usage.completion_tokens
        shown["ttft_seconds"] = None if record.first_token is None else round(record.first_token - context.arrival, 3)
    return shown
