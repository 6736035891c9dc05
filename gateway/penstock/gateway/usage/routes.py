"""GET /usage: what keys have used, for operators."""

from __future__ import annotations

from datetime import date

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.token_budget import utc_now
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.usage.ledger import COLUMNS, UsageLedger

_DEFAULT_DAYS = 30
_MOST_LINES = 10_000


class Usage:
    """`?by=` names what the lines are for, `?start=` and `?end=` the days, `?tenant=`, `?key=` and `?model=` choose."""

    query = ("by", "end", "key", "model", "start", "tenant")

    def __init__(self, ledger: UsageLedger) -> None:
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises InvalidRequestError."""
        exchange: Exchange = scope[SCOPE_KEY]
        query = Request(scope).query_params
        end = _day(query.get("end"), "end") or utc_now().date()
        start = _day(query.get("start"), "start") or _first_day(end)
        by = _columns(query.get("by", "day,tenant,model"))
        only = {name: query[name] for name in ("tenant", "key", "model") if name in query}
        lines, more = await self._ledger.lines(by, start, end, only, _MOST_LINES)
        body = {"start": start.isoformat(), "end": end.isoformat(), "has_more": more, "usage": lines}
        await exchange.respond(200, msgspec.json.encode(body))


def _day(given: str | None, param: str) -> date | None:
    if given is None:
        return None
    try:
        if len(given) == len("2026-01-31"):
            return date.fromisoformat(given)
    except ValueError:
        pass
    raise InvalidRequestError(f"{param} must be a day, as 2026-01-31.", param=param)


def _first_day(end: date) -> date:
    return date.fromordinal(max(1, end.toordinal() - _DEFAULT_DAYS + 1))


def _columns(given: str) -> list[str]:
    """In the order of COLUMNS."""
    names = {name for name in given.split(",") if name}
    if not names <= set(COLUMNS):
        raise InvalidRequestError(f"by must be some of {', '.join(COLUMNS)}, with commas between.", param="by")
    return [name for name in COLUMNS if name in names]
