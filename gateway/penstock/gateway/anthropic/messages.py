"""POST /v1/messages."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec

from penstock.gateway.anthropic.answers import content_blocks, message_object, new_id, stop_fields
from penstock.gateway.anthropic.chat import fitted, generate_request, read_chat
from penstock.gateway.anthropic.events import MessageEvents
from penstock.gateway.anthropic.other_chat import other_chat
from penstock.gateway.anthropic.schemas import MessagesRequest
from penstock.gateway.anthropic.unsupported import UNSUPPORTED
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.other_chats import OtherAnswer, OtherChat
from penstock.gateway.generating.streams import collect, stream
from penstock.gateway.generating.translating_endpoint import TranslatingEndpoint
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.llm.dataplane import GenerateRequest, Generation
from penstock.tokenizers import Part, TextPart, ToolCallPart


class Messages(TranslatingEndpoint[MessagesRequest]):
    def _parse(self, body: bytes) -> MessagesRequest:
        return parse(body, MessagesRequest, UNSUPPORTED)

    def _model_name(self, request: MessagesRequest) -> str:
        return request.model

    async def _generate_request(self, request: MessagesRequest, context: RequestContext) -> GenerateRequest:
        model = self._dataplane.model(request.model, context)
        chat, shape = read_chat(request, model, context, max_tokens=request.max_tokens)
        wanted = generate_request(request, model, self._settings.policy, context)
        prompt = await chat.prompt(self._dataplane, context)
        return fitted(shape.applied(wanted, prompt), model.info.context_length)

    async def _other_chat(self, request: MessagesRequest, context: RequestContext) -> OtherChat:
        return other_chat(request, context)

    def _renamed(self, request: MessagesRequest, model: str) -> MessagesRequest:
        return msgspec.structs.replace(request, model=model)

    def _respond(
        self, exchange: Exchange, request: MessagesRequest, wanted: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        cut = wanted.params.max_tokens < request.max_tokens
        return self._shown(exchange, request, generation, cut=cut)

    def _respond_from(self, exchange: Exchange, request: MessagesRequest, answer: OtherAnswer) -> Awaitable[None]:
        return self._shown(exchange, request, answer, cut=False)

    def _shown(
        self, exchange: Exchange, request: MessagesRequest, generation: Generation | OtherAnswer, *, cut: bool
    ) -> Awaitable[None]:
        if not request.stream:
            return self._answer(exchange, request, generation, cut)
        events = MessageEvents(request.model, generation.usage, cut=cut)
        return stream(exchange, generation, events, opening=events.opening, ending=events.ending)

    async def _answer(
        self, exchange: Exchange, request: MessagesRequest, generation: Generation | OtherAnswer, cut: bool
    ) -> None:
        [collected] = await collect(generation, 1)
        parts: list[Part] = collected.parts or ([TextPart(collected.text)] if collected.text else [])
        called = any(isinstance(part, ToolCallPart) for part in parts)
        message = message_object(new_id("msg"), request.model, content_blocks(parts), generation.usage)
        message.update(stop_fields(collected.finish_reason, collected.stop_reason, called=called, cut=cut))
        await exchange.respond(200, msgspec.json.encode(message))
