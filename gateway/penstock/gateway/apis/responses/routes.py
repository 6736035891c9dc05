"""Routes of the Responses API, of conversations, and of kept chats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from penstock.engines.errors import UnsupportedError
from penstock.gateway.apis.responses.conversations import (
    Conversations,
    CreateConversation,
    CreateItems,
    UpdateConversation,
)
from penstock.gateway.apis.responses.create import CreateResponse, InputTokens
from penstock.gateway.apis.responses.kept_chats import ChatStore, KeptChats, UpdateChat
from penstock.gateway.apis.responses.kept_responses import KeptResponses
from penstock.gateway.apis.responses.schemas import UNSUPPORTED, ResponsesRequest
from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.access import INFER
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import QUERY
from penstock.gateway.transports.http.routes import Handle, Route
from penstock.gateway.transports.http.settings import AppSettings

Answer = Callable[[Exchange, str, str], Awaitable[bytes]]
"""Gives JSON for an id in the path, "" where it has none, and a tenant. Raises PenstockError."""


def response_routes(dataplane: DataPlane, settings: AppSettings, responses: ResponseService) -> list[Route]:
    every, one = "/v1/responses", "/v1/responses/{response_id}"
    create = CreateResponse(dataplane, settings, responses).handle
    count = InputTokens(dataplane, settings, responses).handle
    kept = KeptResponses(responses, settings)
    return [
        Route("POST", every, INFER, create, schema=ResponsesRequest, refused=UNSUPPORTED),
        Route("POST", f"{every}/input_tokens", INFER, count, schema=ResponsesRequest, refused=UNSUPPORTED),
        Route("GET", one, INFER, kept.get, query=("stream", "starting_after", "include")),
        Route("DELETE", one, INFER, kept.delete),
        Route("POST", f"{one}/cancel", INFER, kept.cancel),
        Route("GET", f"{one}/input_items", INFER, kept.input_items, query=(*QUERY, "include")),
    ]


def conversation_routes(responses: ResponseService, settings: AppSettings) -> list[Route]:
    def kept(answer: Answer) -> Handle:
        return partial(_answer, answer, "conversations", "conversation_id", responses.store.enabled)

    every, one = "/v1/conversations", "/v1/conversations/{conversation_id}"
    items, item = f"{one}/items", f"{one}/items/{{item_id}}"
    own = Conversations(responses.conversations, responses.looked_up, settings.max_body_bytes)
    return [
        Route("POST", every, INFER, kept(own.create), schema=CreateConversation),
        Route("GET", one, INFER, kept(own.get)),
        Route("POST", one, INFER, kept(own.update), schema=UpdateConversation),
        Route("DELETE", one, INFER, kept(own.delete)),
        Route("POST", items, INFER, kept(own.create_items), schema=CreateItems, query=("include",)),
        Route("GET", items, INFER, kept(own.list_items), query=(*QUERY, "include")),
        Route("GET", item, INFER, kept(own.get_item), query=("include",)),
        Route("DELETE", item, INFER, kept(own.delete_item)),
    ]


def chat_routes(store: ChatStore) -> list[Route]:
    def kept(answer: Answer) -> Handle:
        return partial(_answer, answer, "chats", "completion_id", store.enabled)

    every, one = "/v1/chat/completions", "/v1/chat/completions/{completion_id}"
    own = KeptChats(store)
    return [
        Route("GET", every, INFER, kept(own.list_all), query=(*QUERY, "model", "metadata")),
        Route("GET", one, INFER, kept(own.get)),
        Route("POST", one, INFER, kept(own.update), schema=UpdateChat),
        Route("DELETE", one, INFER, kept(own.delete)),
        Route("GET", f"{one}/messages", INFER, kept(own.messages), query=QUERY),
    ]


async def _answer(answer: Answer, kept: str, id_name: str, enabled: bool, exchange: Exchange) -> None:
    """`kept`: what is kept, in words; `enabled`: the server keeps any."""
    if not enabled:
        raise UnsupportedError(f"This server keeps no {kept} (--stored-responses).")
    with exchange.call():
        await exchange.respond(200, await answer(exchange, exchange.names.get(id_name, ""), exchange.context.tenant))
