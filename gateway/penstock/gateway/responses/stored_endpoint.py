"""What the routes of kept chats and conversations have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from starlette.types import Receive, Scope, Send

from penstock.engines.errors import UnsupportedError
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange


class StoredEndpoint(ABC):
    """Answers with JSON about what a tenant has in a store, if the server keeps anything."""

    kept: ClassVar[str]
    """What is kept, in words."""
    id_name: ClassVar[str]
    """Of its id in the path; routes for all of them have none."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._enabled:
            raise UnsupportedError(f"This server keeps no {self.kept} (--stored-responses).")
        exchange: Exchange = scope[SCOPE_KEY]
        kept_id = scope.get("path_params", {}).get(self.id_name, "")
        with exchange.call():
            await exchange.respond(200, await self._answer(exchange, kept_id, exchange.context.tenant))

    @abstractmethod
    async def _answer(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        """JSON. Raises PenstockError."""
