"""A request that the server itself makes of one of its endpoints: the same way as a client's, behind access control."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive

from penstock.engines.errors import PenstockError
from penstock.gateway.requests.call import DrainState
from penstock.gateway.requests.context import Principal, RoutedName
from penstock.gateway.transports.http.error_form import OPENAI_ERRORS, ErrorForm
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import Handle

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class InnerAnswer:
    request_id: str = ""
    status: int = 0
    body: bytes = b""
    reason: str = ""
    """The error's code, whatever the form in which the body has it."""
    warnings: list[dict[str, str]] = field(default_factory=list)
    """Of its record, as the reason is."""

    async def take(self, message: Message) -> None:
        """As ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


class InnerRequest:
    """POSTs JSON to a route; to be run as `Detached`, by whose journal it is noted. It has the drain of all requests,
    and computes in idle steps alone."""

    def __init__(
        self,
        handle: Handle,
        route: str,
        body: bytes,
        principal: Principal,
        drain: DrainState,
        error_form: ErrorForm = OPENAI_ERRORS,
        routed: RoutedName | None = None,
    ) -> None:
        """`routed`: the target of its model."""
        self._handle = handle
        self.answer = InnerAnswer()
        """Whole when `run` has returned, an error's too."""
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": route,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self._exchange = Exchange(scope, _once(body), self.answer.take, drain)
        self._exchange.error_form = error_form
        self.context = context = self._exchange.context
        context.principal, context.background, context.routed = principal, True, routed
        context.record.route = route
        self.answer.request_id = context.id

    async def run(self) -> None:
        try:
            await self._handle(self._exchange)
        except PenstockError as error:
            await self._exchange.fail(error)
        except Exception as error:
            logger.exception("Unexpected error")
            await self._exchange.fail(error)
        record = self.context.record
        self.answer.reason, self.answer.warnings = record.reason, record.warnings


def _once(body: bytes) -> Receive:
    rest: bytes | None = body

    async def receive() -> Message:
        nonlocal rest
        data, rest = rest, None
        if data is None:
            await asyncio.Event().wait()  # this client never leaves
        return {"type": "http.request", "body": data, "more_body": False}

    return receive
