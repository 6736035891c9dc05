"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.engines.errors import UnsupportedError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.endpoint import GeneratingEndpoint
from penstock.gateway.generating.sse import stream
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane, GenerateRequest, Generation
from penstock.gateway.openai.chat_generation import chat_generation
from penstock.gateway.openai.service_tier import real_tier
from penstock.gateway.responses.answer import ResponseObject
from penstock.gateway.responses.chat_request import chat_request, wants_logprobs
from penstock.gateway.responses.conversation import template_messages
from penstock.gateway.responses.events import ResponseEvents, StreamErrors
from penstock.gateway.responses.field_names import in_words_of_responses, name_of_responses
from penstock.gateway.responses.items import input_items, shown_item
from penstock.gateway.responses.output import Output
from penstock.gateway.responses.schemas import InputItem, ResponsesRequest
from penstock.gateway.responses.store import ResponseStore, StoredResponse
from penstock.gateway.responses.unsupported import UNSUPPORTED


@dataclass(slots=True)
class Asked:
    """A request, and what it goes on from."""

    request: ResponsesRequest
    stream: bool | None
    items: list[InputItem] = field(default_factory=list)
    previous: StoredResponse | None = None


class CreateResponse(GeneratingEndpoint[Asked]):
    schema, unsupported = ResponsesRequest, UNSUPPORTED

    def __init__(self, dataplane: DataPlane, settings: AppSettings, store: ResponseStore) -> None:
        super().__init__(dataplane, settings)
        self._store = store

    def _parse(self, body: bytes) -> Asked:
        request = parse(body, self.schema, self.unsupported)
        if request.store and not self._store.enabled:
            raise UnsupportedError("store: this server keeps no responses (--stored-responses).", param="store")
        return Asked(request, request.stream)

    async def _wanted(self, asked: Asked, context: RequestContext) -> GenerateRequest:
        request = asked.request
        self._dataplane.model(request.model)
        asked.items = input_items(request.input)
        if request.previous_response_id is not None:
            asked.previous = self._store.get(request.previous_response_id, context.tenant, "previous_response_id")
        earlier = [] if asked.previous is None else asked.previous.conversation()
        messages = template_messages(request.instructions, earlier, asked.items)
        chat = chat_request(request)
        with in_words_of_responses():
            wanted = await chat_generation(self._dataplane, self._settings, chat, messages, context)
        if wanted.stages and wants_logprobs(request):
            message = "include: this model's answers may have reasoning or calls, for which there are no logprobs here."
            raise UnsupportedError(message, param="include")
        return replace(wanted, grammar_field=name_of_responses(wanted.grammar_field))

    def _respond(
        self, exchange: Exchange, asked: Asked, wanted: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        store = self._store.enabled and asked.request.store is not False
        tier = real_tier(asked.request.service_tier, wanted)
        response = ResponseObject(asked.request, wanted, generation.usage, store=store, tier=tier)

        def keep(ended: Mapping[str, Any]) -> None:
            if store:
                items = [shown_item(item) for item in asked.items]
                self._store.keep(exchange.context.tenant, ended, items, asked.previous)

        if not asked.stream:
            return self._answer(exchange, Output(logprobs=wants_logprobs(asked.request)), generation, response, keep)
        events = ResponseEvents(response, keep, logprobs=wants_logprobs(asked.request))
        exchange.error_form = StreamErrors(events)
        return stream(exchange, generation, events, opening=events.opening, ending=events.ending)

    async def _answer(
        self,
        exchange: Exchange,
        output: Output,
        generation: Generation,
        response: ResponseObject,
        keep: Callable[[Mapping[str, Any]], None],
    ) -> None:
        async for deltas in generation:
            for delta in deltas:
                output.add(delta)
        ended = response.ended(output.items, output.finish_reason)
        keep(ended)
        await exchange.respond(200, msgspec.json.encode(ended))
