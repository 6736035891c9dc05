"""GET /usage: what keys have used, for operators."""

from __future__ import annotations

from datetime import date
from functools import partial

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.usage.ledger import COLUMNS, UsageLedger
from penstock.gateway.requests.access import OPERATE
from penstock.gateway.requests.quota import utc_now
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import SERVER, Route

_DEFAULT_DAYS = 30
_MOST_LINES = 10_000


def usage_routes(ledger: UsageLedger | None) -> list[Route]:
    """None without a ledger."""
    if ledger is None:
        return []
    query = ("by", "end", "key", "model", "start", "tenant")
    return [Route("GET", "/usage", OPERATE, partial(_show, ledger), SERVER, query=query)]


async def _show(ledger: UsageLedger, exchange: Exchange) -> None:
    """`?by=` names what the lines are for, `?start=` and `?end=` the days, `?tenant=`, `?key=` and `?model=` choose.
    Raises InvalidRequestError."""
    query = exchange.query
    end = _day(query.get("end"), "end") or utc_now().date()
    start = _day(query.get("start"), "start") or _first_day(end)
    by = _columns(query.get("by", "day,tenant,model"))
    only = {name: query[name] for name in ("tenant", "key", "model") if name in query}
    lines, more = await ledger.lines(by, start, end, only, _MOST_LINES)
    body = {"start": start.isoformat(), "end": end.isoformat(), "has_more": more, "usage": lines}
    await exchange.respond(200, msgspec.json.encode(body))


def _day(text: str | None, param: str) -> date | None:
    if text is None:
        return None
    try:
        if len(text) == len("2026-01-31"):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise InvalidRequestError(f"{param} must be a day, as 2026-01-31.", param=param)


def _first_day(end: date) -> date:
    return date.fromordinal(max(1, end.toordinal() - _DEFAULT_DAYS + 1))


def _columns(text: str) -> list[str]:
    """In the order of COLUMNS."""
    names = {name for name in text.split(",") if name}
    if not names <= set(COLUMNS):
        raise InvalidRequestError(f"by must be some of {', '.join(COLUMNS)}, with commas between.", param="by")
    return [name for name in COLUMNS if name in names]
