"""Everything that a server keeps of responses: in its folder, or in memory."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.apis.responses.background import BackgroundResponses
from penstock.gateway.apis.responses.bounds import bounds_of
from penstock.gateway.apis.responses.conversations import ConversationStore
from penstock.gateway.apis.responses.items import id_in_message
from penstock.gateway.apis.responses.kept_chats import ChatStore
from penstock.gateway.apis.responses.schemas import InputItem
from penstock.gateway.apis.responses.store import ResponseStore
from penstock.gateway.database import Database, is_disk_error
from penstock.gateway.transports.http.settings import AppSettings

logger = logging.getLogger("penstock")

_TIDY_EVERY_S = 600.0


class ResponseService:
    def __init__(self, database: Database, settings: AppSettings, *, retention: float | None = None) -> None:
        """`retention`: seconds after which all of it is deleted; None: never. Raises sqlite3.Error."""
        bounds = bounds_of(settings)
        self._most_bytes_each = bounds.most_bytes_each
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

    async def looked_up(self, items: list[InputItem], tenant: str, field: str = "input") -> list[InputItem]:
        """The items, with what is kept for the tenant in place of each reference to it. `field` is the request's.
        Raises NotFoundError, InvalidRequestError when they are too large together."""
        references = {item.id or "": None for item in items if item.type == "item_reference"}
        if not references:
            return items
        kept = await self.store.output_items(references, tenant)
        kept |= await self.conversations.kept_items(references.keys() - kept.keys(), tenant)
        for item_id in references:
            if item_id not in kept:
                raise NotFoundError(f"Item with id '{id_in_message(item_id)}' not found.", param=field)
        sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in kept.items()}
        if sum(sizes[item.id or ""] for item in items if item.type == "item_reference") > self._most_bytes_each:
            message = f"{field}: the items that it refers to have more than {self._most_bytes_each} bytes."
            raise InvalidRequestError(message, param=field)
        return [kept[item.id or ""] if item.type == "item_reference" else item for item in items]

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
