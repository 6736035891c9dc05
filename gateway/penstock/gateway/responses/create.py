"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.other_chats import OtherAnswer, OtherChat
from penstock.gateway.generating.streams import stream
from penstock.gateway.generating.translating_endpoint import TranslatingEndpoint
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane, GenerateRequest, Generation, Usage
from penstock.gateway.openai.chat_generation import chat_generation
from penstock.gateway.openai.other_chat import other_chat
from penstock.gateway.openai.service_tier import real_tier
from penstock.gateway.responses.answer import ResponseObject
from penstock.gateway.responses.asked import Asked, Keeping
from penstock.gateway.responses.background import BackgroundResponse
from penstock.gateway.responses.bounds import OVERHEAD
from penstock.gateway.responses.chat_request import chat_request
from penstock.gateway.responses.conversation import template_messages
from penstock.gateway.responses.event_log import send_events
from penstock.gateway.responses.events import ResponseEvents, StreamErrors
from penstock.gateway.responses.field_names import in_words_of_responses, name_of_responses
from penstock.gateway.responses.output import Output
from penstock.gateway.responses.schemas import ResponsesRequest
from penstock.gateway.responses.service import ResponseService
from penstock.gateway.responses.truncation import truncated
from penstock.gateway.responses.unsupported import UNSUPPORTED

_BACKGROUND_ROUTE = "/v1/responses/background"
"""In records: the request itself is answered at once."""


class CreateResponse(TranslatingEndpoint[Asked]):
    def __init__(self, dataplane: DataPlane, settings: AppSettings, responses: ResponseService) -> None:
        super().__init__(dataplane, settings)
        self._responses = responses
        self._stores = responses.store.enabled

    def _parse(self, body: bytes) -> Asked:
        request = parse(body, ResponsesRequest, UNSUPPORTED)
        needs_store = {
            "store": request.store,
            "conversation": request.conversation_id is not None,
            "background": request.background,
        }
        for name, asked in needs_store.items():
            if asked and not self._stores:
                raise UnsupportedError(f"{name}: this server keeps no responses (--stored-responses).", param=name)
        if request.conversation_id is not None and request.previous_response_id is not None:
            raise InvalidRequestError("conversation and previous_response_id exclude each other.", param="conversation")
        if request.background:
            self._check_background(request)
        return Asked(request, request.stream)

    def _check_background(self, request: ResponsesRequest) -> None:
        """Raises UnsupportedError, InvalidRequestError."""
        if not self._responses.background.enabled:
            message = "background: this server makes no responses in the background (--background-responses)."
            raise UnsupportedError(message, param="background")
        if request.store is False:
            raise InvalidRequestError("store must not be false with background.", param="store")

    def _model_name(self, request: Asked) -> str:
        return request.request.model

    async def _generate_request(self, asked: Asked, context: RequestContext) -> GenerateRequest:
        request = asked.request
        model = self._dataplane.model(request.model, context)
        messages = await self._messages(asked, context)
        chat = chat_request(request, asked.tools, asked.include, context)
        with in_words_of_responses(context.record, asked.tools.places):

            def render(messages: Sequence[dict[str, Any]]) -> Awaitable[GenerateRequest]:
                return chat_generation(self._dataplane, self._settings, chat, list(messages), context)

            if request.truncation == "auto":
                wanted = await truncated(messages, model.info.context_length, request.max_output_tokens, render)
            else:
                wanted = await render(messages)
        if wanted.stages and asked.include.logprobs:
            asked.leave_out_logprobs(context, "this model's answers may have reasoning or calls, which have none here.")
            wanted = replace(wanted, params=msgspec.structs.replace(wanted.params, logprobs=None))
        return replace(wanted, grammar_field=name_of_responses(wanted.grammar_field))

    async def _messages(self, asked: Asked, context: RequestContext) -> list[dict[str, Any]]:
        """As chat templates know them, with those that the request goes on from. Raises PenstockError."""
        request = asked.request
        earlier = await asked.earlier(self._responses, context)
        before = "previous_response_id" if request.conversation_id is None else "conversation"
        return template_messages(request.instructions, earlier, asked.items, asked.tools, context, before)

    async def _answer_at_once(self, exchange: Exchange, asked: Asked) -> bool:
        if not asked.request.background:
            return False
        response = await self._begin(exchange.context, asked)
        if response.log is None:
            await exchange.respond(200, msgspec.json.encode(response.shown()))
        else:
            await send_events(exchange, response.log, -1, self._settings.heartbeat_s)
        return True

    async def _begin(self, context: RequestContext, asked: Asked) -> BackgroundResponse:
        """Raises PenstockError."""
        background, tenant = self._responses.background, context.tenant
        background.check_room(tenant)
        wanted = await self._generate_request(asked, context)
        keeping = Keeping(self._responses, asked, tenant)
        response = _object(asked, wanted, Usage(), store=True)
        queued = msgspec.json.encode(response.queued())
        if not keeping.fits(queued):
            raise InvalidRequestError("The conversation is too large to be kept.", param="input")
        size = len(queued) + len(asked.items_json) + OVERHEAD
        background.check_room(tenant, size)  # others have come meanwhile
        own = context.next_request()
        own.record.route = _BACKGROUND_ROUTE
        context.hand_over_to(own)
        generate = partial(self._dataplane.generate, replace(wanted, context=own))
        events = ResponseEvents(response, keeping.end, asked.include, asked.tools)
        begun = BackgroundResponse(own, events, generate, size=size, stream=bool(asked.stream))
        store = self._responses.store
        background.begin(begun, store.keep(tenant, response.id, queued, asked.items_json, asked.previous, is_open=True))
        return begun

    def _respond(
        self, exchange: Exchange, asked: Asked, wanted: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        return self._send(
            exchange, asked, _object(asked, wanted, generation.usage, store=self._kept(asked)), generation
        )

    async def _other_chat(self, asked: Asked, context: RequestContext) -> OtherChat:
        if asked.request.background:
            message = "background: this model, which is no language model of this server, makes no such responses."
            raise UnsupportedError(message, param="background")
        messages = await self._messages(asked, context)
        if asked.include.logprobs:
            asked.leave_out_logprobs(context, "models of other servers have no logprobs here.")
        if asked.request.truncation == "auto":
            context.ignore("truncation", "models of other servers say themselves what does not fit.")
        return other_chat(chat_request(asked.request, asked.tools, asked.include, context), messages)

    def _renamed(self, asked: Asked, model: str) -> Asked:
        return Asked(msgspec.structs.replace(asked.request, model=model), asked.stream)

    def _respond_from(self, exchange: Exchange, asked: Asked, answer: OtherAnswer) -> Awaitable[None]:
        request = asked.request
        response = ResponseObject(
            request,
            answer.usage,
            exchange.context.record,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0,
            store=self._kept(asked),
            tier="default",
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
        )
        return self._send(exchange, asked, response, answer)

    def _kept(self, asked: Asked) -> bool:
        return self._stores and asked.request.store is not False

    def _send(
        self, exchange: Exchange, asked: Asked, response: ResponseObject, generation: Generation | OtherAnswer
    ) -> Awaitable[None]:
        keep = Keeping(self._responses, asked, exchange.context.tenant).keep
        if not asked.stream:
            output = Output(asked.include, asked.tools, response.id)
            return self._answer(exchange, output, generation, response, keep)
        events = ResponseEvents(response, keep, asked.include, asked.tools)
        exchange.error_form = StreamErrors(events)
        return stream(exchange, generation, events, opening=events.opening, ending=events.ending)

    async def _answer(
        self,
        exchange: Exchange,
        output: Output,
        generation: Generation | OtherAnswer,
        response: ResponseObject,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        async for deltas in generation:
            for delta in deltas:
                output.add(delta)
        ended = response.ended(output.items, output.finish_reason)
        keep(ended)
        await exchange.respond(200, msgspec.json.encode(ended))


def _object(asked: Asked, wanted: GenerateRequest, usage: Usage, *, store: bool) -> ResponseObject:
    params, tier, record = wanted.params, real_tier(asked.request.service_tier, wanted), wanted.context.record
    return ResponseObject(
        asked.request,
        usage,
        record,
        temperature=params.temperature,
        top_p=params.top_p,
        store=store,
        tier=tier,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
