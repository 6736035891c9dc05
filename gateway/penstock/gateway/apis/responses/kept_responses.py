"""Kept responses: what is shown of them, and their end."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.responses.background import send_events
from penstock.gateway.apis.responses.schemas import DEFAULT_PAGE, LONGEST_PAGE, checked_query
from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import page
from penstock.gateway.transports.http.settings import AppSettings

_LONGEST_NUMBER = 9


class KeptResponses:
    """Answers about them, also about those that are still being made."""

    def __init__(self, responses: ResponseService, settings: AppSettings) -> None:
        self._store = responses.store
        self._background = responses.background
        self._heartbeat_s = settings.heartbeat_s

    async def get(self, exchange: Exchange) -> None:
        """The response, or the events of one that was begun in the background."""
        query = checked_query(exchange)
        response_id, tenant = exchange.names["response_id"], exchange.context.tenant
        if not _wants_stream(query):
            if "starting_after" in query:
                raise InvalidRequestError("starting_after needs stream.", param="starting_after")
            await exchange.respond(200, await self._find(response_id, tenant))
            return
        after = _starting_after(query.get("starting_after"))
        await self._find(response_id, tenant)
        log = self._background.log(response_id, tenant)
        if log is None:
            message = "stream: only responses that were begun with background and stream have events, for some time."
            raise UnsupportedError(message, param="stream")
        with exchange.call() as call:
            call.watch()
            await send_events(exchange, log, after, self._heartbeat_s)

    async def delete(self, exchange: Exchange) -> None:
        response_id, tenant = await self._ended(exchange)
        await self._store.delete(response_id, tenant)
        self._background.forget(response_id)
        deleted = {"id": response_id, "object": "response", "deleted": True}
        await exchange.respond(200, msgspec.json.encode(deleted))

    async def cancel(self, exchange: Exchange) -> None:
        response = await self._store.find(*await self._ended(exchange))
        if not msgspec.json.decode(response)["background"]:
            message = "Only responses in the background can be cancelled. Close the connection to end another one."
            raise InvalidRequestError(message, param="response_id")
        await exchange.respond(200, response)

    async def input_items(self, exchange: Exchange) -> None:
        """A page of them, the newest first unless `order` is asc."""
        query = checked_query(exchange)
        stored = await self._store.get(exchange.names["response_id"], exchange.context.tenant)
        items = page(stored.input_items(), query, default=DEFAULT_PAGE, most=LONGEST_PAGE)
        await exchange.respond(200, msgspec.json.encode(items))

    async def _ended(self, exchange: Exchange) -> tuple[str, str]:
        """Cancels the response if it is still being made. Returns its id and its tenant."""
        checked_query(exchange)
        response_id, tenant = exchange.names["response_id"], exchange.context.tenant
        under_way = self._background.find(response_id, tenant)
        if under_way is not None:
            await self._background.cancel(under_way)
        return response_id, tenant

    async def _find(self, response_id: str, tenant: str) -> bytes:
        """JSON of the response object, as it is now. Raises NotFoundError."""
        under_way = self._background.find(response_id, tenant)
        if under_way is not None:
            return msgspec.json.encode(under_way.shown())
        return await self._store.find(response_id, tenant)


def _wants_stream(query: Mapping[str, str]) -> bool:
    """Raises InvalidRequestError."""
    text = query.get("stream", "false")
    if text not in ("true", "false"):
        raise InvalidRequestError("stream must be true or false.", param="stream")
    return text == "true"


def _starting_after(text: str | None) -> int:
    """-1: from the beginning. Raises InvalidRequestError."""
    if text is None:
        return -1
    if not (text.isdecimal() and text.isascii() and len(text) <= _LONGEST_NUMBER):
        raise InvalidRequestError("starting_after must be the number of an event.", param="starting_after")
    return int(text)
