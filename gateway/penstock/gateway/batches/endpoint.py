"""What the routes of files and batches share."""

from __future__ import annotations

from abc import ABC, abstractmethod

from starlette.types import Receive, Scope, Send

from penstock.engines.errors import UnsupportedError
from penstock.gateway.batches.service import BatchService
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange


class BatchEndpoint(ABC):
    """An ASGI application."""

    def __init__(self, service: BatchService | None) -> None:
        """None: the server keeps no files."""
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service is None:
            raise UnsupportedError("This server keeps no files: it has neither --data-dir nor --data-memory.")
        await self.answer(scope[SCOPE_KEY], self._service)

    @abstractmethod
    async def answer(self, exchange: Exchange, service: BatchService) -> None:
        """The whole response. Raises PenstockError."""
