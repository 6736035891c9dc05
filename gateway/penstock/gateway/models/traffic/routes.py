"""GET /traffic, and GET, PUT and DELETE of /traffic/{name}: what operators see and change of public names."""

from __future__ import annotations

from functools import partial

import msgspec

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.configuration.traffic_rules import TrafficRule
from penstock.gateway.models.traffic.table import PublicName, TrafficTable
from penstock.gateway.requests.access import CHANGE_MODELS, OPERATE
from penstock.gateway.requests.bounded_json import decode_checked, decode_json
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import SERVER, Route

_MAX_BODY = 1 << 20


def traffic_routes(table: TrafficTable) -> list[Route]:
    one = "/traffic/{name:path}"
    return [
        Route("GET", "/traffic", OPERATE, partial(_list, table), SERVER),
        Route("GET", one, OPERATE, partial(_get, table), SERVER),
        Route("PUT", one, CHANGE_MODELS, partial(_put, table), SERVER),
        Route("DELETE", one, CHANGE_MODELS, partial(_delete, table), SERVER),
    ]


async def _list(table: TrafficTable, exchange: Exchange) -> None:
    """Every rule with its state, and the latest events, the oldest first."""
    rules = [shown(public) for _, public in sorted(table.names.items())]
    await exchange.respond(200, msgspec.json.encode({"rules": rules, "events": list(table.events)}))


async def _get(table: TrafficTable, exchange: Exchange) -> None:
    """Raises NotFoundError."""
    name = exchange.names["name"]
    public = table.names.get(name)
    if public is None:
        raise _no_rule(name)
    await exchange.respond(200, msgspec.json.encode(shown(public)))


async def _put(table: TrafficTable, exchange: Exchange) -> None:
    """Sets a name's rule, from the start of its shift where it has one. It lasts until the server ends. Raises
    InvalidRequestError."""
    name = exchange.names["name"]
    with exchange.call():
        body = await exchange.body(_MAX_BODY)
        fields = decode_json(body, dict[str, msgspec.Raw])
        fields.setdefault("name", msgspec.Raw(msgspec.json.encode(name)))
        rule = decode_checked(msgspec.json.encode(fields), TrafficRule)
        if rule.name != name:
            raise InvalidRequestError("name: it is another one than in the path.", param="name")
        try:
            table.put(rule)
        except ValueError as error:
            raise InvalidRequestError(f"{error}.") from None
        await exchange.respond(200, msgspec.json.encode(shown(table.names[name])))


async def _delete(table: TrafficTable, exchange: Exchange) -> None:
    """Raises NotFoundError."""
    name = exchange.names["name"]
    if not table.remove(name):
        raise _no_rule(name)
    await exchange.respond(200, msgspec.json.encode({"name": name, "deleted": True}))


def shown(public: PublicName) -> dict[str, object]:
    """A rule and its state, as JSON has it."""
    route = public.route
    shares = route.shares()
    targets = [
        {
            "target": target,
            "share": shares.get(target, 0.0),
            "unavailable": public.unavailable.get(target),
            "accepted": counts.accepted,
            "in_flight": counts.in_flight,
            "ended": {outcome.value: count for outcome, count in sorted(counts.ended.items())},
        }
        for target, counts in route.counts.items()
    ]
    fields: dict[str, object] = {"rule": public.rule, "targets": targets, "sequences": len(route.pins)}
    shift = route.shift
    if shift is not None:
        fields["shift"] = {
            "state": shift.state,
            "step": shift.step,
            "percent": shift.percent,
            "reason": shift.reason,
            "ended": shift.new.ended,
            "error_rate": shift.error_rate,
            "p95_s": shift.new.p95,
            "others_p95_s": shift.old.p95,
        }
    if public.shadows is not None:
        results = {result.value: count for result, count in sorted(public.shadows.results.items())}
        fields["shadow"] = {"in_flight": public.shadows.in_flight, "results": results}
    return fields


def _no_rule(name: str) -> NotFoundError:
    return NotFoundError(f"There is no traffic rule for `{name[:64]}`.")
