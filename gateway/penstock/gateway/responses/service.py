"""What a server keeps of responses: in its folder, or in memory."""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.gateway.database import Database, is_disk_error
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.responses.background import BackgroundResponses
from penstock.gateway.responses.bounds import bounds_of
from penstock.gateway.responses.chat_store import ChatStore
from penstock.gateway.responses.conversation_store import ConversationStore
from penstock.gateway.responses.store import ResponseStore

logger = logging.getLogger("penstock")

_TIDY_EVERY_S = 600.0


class ResponseService:
    def __init__(self, database: Database, settings: AppSettings, *, retention: float | None = None) -> None:
        """`retention`: seconds after which all of it is deleted; None: never. Raises sqlite3.Error."""
        bounds = bounds_of(settings)
        self.store = ResponseStore(database, bounds)
        self.conversations = ConversationStore(database, bounds)
        self.chats = ChatStore(database, bounds)
        self.background = BackgroundResponses(settings)
        self._retention = retention
        self._tidying: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._retention is not None:
            self._tidying = asyncio.create_task(self._tidy(self._retention))

    async def stop(self) -> None:
        """Once the drain has expired: what it has ended in the background is in the store."""
        if self._tidying is not None:
            self._tidying.cancel()
        await self.background.wait()

    async def _tidy(self, retention: float) -> None:
        while True:
            try:
                await self.store.delete_old(time.time() - retention)
                await self.conversations.delete_old(time.time() - retention)
                await self.chats.delete_old(time.time() - retention)
            except Exception as error:
                if not is_disk_error(error):
                    raise
                logger.exception("old responses could not be deleted")
            await asyncio.sleep(_TIDY_EVERY_S)
