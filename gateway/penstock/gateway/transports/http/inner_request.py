"""A request that the server itself makes of one of its endpoints: the same way as a client's, behind access control."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Message

from penstock.engines.errors import PenstockError
from penstock.gateway.requests.call import Detached
from penstock.gateway.requests.context import Principal, RoutedName
from penstock.gateway.transports.http.error_form import OPENAI_ERRORS, ErrorForm
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import Handle
from penstock.gateway.transports.http.settings import AppSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class InnerAnswer:
    request_id: str
    status: int = 0
    body: bytes = b""
    reason: str = ""
    """The error's code, whatever the form in which the body has it."""
    warnings: list[dict[str, str]] = field(default_factory=list)
    """Of its record, as the reason is."""


async def ask_in_background(
    handle: Handle,
    route: str,
    body: bytes,
    principal: Principal,
    settings: AppSettings,
    error_form: ErrorForm = OPENAI_ERRORS,
    routed: RoutedName | None = None,
) -> InnerAnswer:
    """POSTs JSON to a route, and awaits the whole answer, an error's too. It has the access log, the
    metrics and the drain of all requests, and computes in idle steps alone. `routed`: the target of its model."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # this client never leaves
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        else:
            answer.body += message.get("body", b"")

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": route,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    exchange = Exchange(scope, receive, send, settings.drain)
    exchange.error_form = error_form
    context = exchange.context
    context.routed = routed
    answer = InnerAnswer(context.id)
    context.principal, context.background, context.record.route = principal, True, route
    await Detached(context, settings.journal, partial(_answered, exchange, handle)).run()
    answer.reason, answer.warnings = context.record.reason, context.record.warnings
    return answer


async def _answered(exchange: Exchange, handle: Handle) -> None:
    try:
        await handle(exchange)
    except PenstockError as error:
        await exchange.fail(error)
    except Exception as error:
        logger.exception("Unexpected error")
        await exchange.fail(error)
