"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, NotFoundError, UnsupportedError
from penstock.gateway.apis.openai.chat import chat_generation, upstream_chat
from penstock.gateway.apis.openai.validation import real_tier
from penstock.gateway.apis.responses.answer import ResponseObject
from penstock.gateway.apis.responses.background import BackgroundResponse, send_events
from penstock.gateway.apis.responses.bounds import OVERHEAD
from penstock.gateway.apis.responses.chat_request import chat_request, in_words_of_responses, name_of_responses
from penstock.gateway.apis.responses.conversation import template_messages
from penstock.gateway.apis.responses.events import Output, ResponseEvents, StreamErrors
from penstock.gateway.apis.responses.items import id_in_message, input_items, shown_item
from penstock.gateway.apis.responses.schemas import NOTHING, UNSUPPORTED, Include, InputItem, ResponsesRequest
from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.apis.responses.store import StoredResponse
from penstock.gateway.apis.responses.tools import NO_TOOLS, ResponseTools, response_tools
from penstock.gateway.errors import PreviousResponseError
from penstock.gateway.generating.endpoint import TranslatingEndpoint
from penstock.gateway.generating.fitting import longest_that_fits, within
from penstock.gateway.generating.request_reading import parse
from penstock.gateway.generating.streams import stream
from penstock.gateway.models.entries import Kind, UpstreamAnswer, UpstreamChat
from penstock.gateway.models.language.dataplane import DataPlane, GenerateRequest, Generation, Usage
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

_ANSWER_SHARE = 4
"""Of the context, a quarter is left to an answer without a bound, and no more to one that has."""

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages], Awaitable[GenerateRequest]]


async def truncated(messages: Messages, context_length: int, max_tokens: int | None, render: Render) -> GenerateRequest:
    """The request with as many of the last messages as leave room for the answer, whose bound is `max_tokens`; all of
    them where they do. System messages at the beginning and the user's last message stay. Raises what `render` does,
    and ContextLengthError where nothing more can go."""
    share = context_length // _ANSWER_SHARE
    whole = await within(context_length - min(max_tokens or 1, share), render(messages))
    starts = _starts(messages)
    if whole is not None or not starts:
        return whole or await render(messages)
    room = min(max_tokens or share, share)

    def shorter(start: int) -> Awaitable[GenerateRequest]:
        return render(_from(messages, start))

    fitting = await longest_that_fits(messages, starts, shorter, context_length - room)
    return fitting or await shorter(starts[-1])


def _starts(messages: Messages) -> list[int]:
    """Where a shorter conversation may begin: at a turn of the user, or, behind the user's last message, which stays,
    at a later turn of the assistant."""
    roles = [message["role"] for message in messages]
    head = next((number for number, role in enumerate(roles) if role != "system"), len(roles))
    users = [number for number, role in enumerate(roles) if role == "user"]
    last_user = users[-1] if users else len(roles)
    turns = [number for number in range(last_user + 2, len(roles)) if roles[number] == "assistant"]
    return [*(number for number in users if number > head), *turns]


def _from(messages: Messages, start: int) -> Messages:
    head = next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))
    last_user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=start)
    question = [messages[last_user]] if last_user < start else []
    return [*messages[:head], *question, *messages[start:]]


_encode = msgspec.json.Encoder().encode
_TOO_LARGE = "The response is too large to be kept."


@dataclass
class Asked:
    request: ResponsesRequest
    stream: bool | None
    items: list[InputItem] = field(default_factory=list)
    previous: StoredResponse | None = None
    include: Include = NOTHING
    tools: ResponseTools = NO_TOOLS

    @cached_property
    def shown_items(self) -> list[dict[str, Any]]:
        """With ids."""
        return [shown_item(item) for item in self.items]

    @cached_property
    def items_json(self) -> bytes:
        return _encode(self.shown_items)

    def leave_out_logprobs(self, context: RequestContext, reason: str) -> None:
        """The answer comes without, and `context` notes it."""
        context.ignore("include", reason)
        self.include = replace(self.include, logprobs=False)
        self.request = msgspec.structs.replace(self.request, top_logprobs=None)

    async def earlier(self, responses: ResponseService, context: RequestContext) -> list[InputItem]:
        """Reads the request, and gives the items that it goes on from. Raises InvalidRequestError."""
        request, tenant = self.request, context.tenant
        self.include = Include.parse(request.include, context)
        self.tools = response_tools(request, context)
        self.items = await responses.looked_up(input_items(request.input, context), tenant)
        if request.conversation_id is not None:
            more = len(self.items_json)
            return await responses.conversations.earlier_items(request.conversation_id, tenant, more)
        if request.previous_response_id is None:
            return []
        name = "previous_response_id"
        try:
            self.previous = await responses.store.get(request.previous_response_id, tenant, name)
        except NotFoundError:
            message = f"Previous response with id '{id_in_message(request.previous_response_id)}' not found."
            raise PreviousResponseError(message, param=name) from None
        if self.previous.response.get("conversation") is not None:
            raise InvalidRequestError(f"{name}: it is part of a conversation: name that instead.", param=name)
        return self.previous.conversation()


class Keeping:
    """Of one response."""

    def __init__(self, responses: ResponseService, asked: Asked, tenant: str) -> None:
        self._responses = responses
        self._asked = asked
        self._tenant = tenant

    def keep(self, ended: dict[str, Any]) -> None:
        """Notes in the response when it is too large."""
        if ended["store"]:
            body = _encode(ended)
            ended["store"] = self.fits(body)
            if ended["store"]:
                asked = self._asked
                self._responses.store.keep(self._tenant, ended["id"], body, asked.items_json, asked.previous)
        self._go_on(ended)

    def fits(self, body: bytes) -> bool:
        """Whether a response with this JSON is small enough to be kept."""
        return self._responses.store.fits(len(body) + len(self._asked.items_json), self._asked.previous)

    def end(self, ended: dict[str, Any]) -> None:
        """For one in the background, which is kept since it was queued. One that is too large has failed."""
        body = _encode(ended)
        if not self.fits(body):
            error = {"code": "server_error", "message": _TOO_LARGE}
            ended.update(status="failed", output=[], error=error, incomplete_details=None, completed_at=None)
            body = _encode(ended)
        self._responses.store.end(self._tenant, ended["id"], body)
        self._go_on(ended)

    def _go_on(self, ended: Mapping[str, Any]) -> None:
        """The conversation, if there is one."""
        conversation_id = self._asked.request.conversation_id
        if conversation_id is not None and ended["status"] in ("completed", "incomplete"):
            output = [item for item in ended["output"] if not _is_half_a_call(item)]
            items = self._asked.shown_items + output
            self._responses.conversations.append(conversation_id, self._tenant, items)


def _is_half_a_call(item: Mapping[str, Any]) -> bool:
    """Nobody can answer that."""
    return item["type"] in ("function_call", "custom_tool_call") and item["status"] == "incomplete"


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
                text_request = await truncated(messages, model.info.context_length, request.max_output_tokens, render)
            else:
                text_request = await render(messages)
        if text_request.stages and asked.include.logprobs:
            asked.leave_out_logprobs(context, "this model's answers may have reasoning or calls, which have none here.")
            text_request = replace(text_request, params=msgspec.structs.replace(text_request.params, logprobs=None))
        return replace(text_request, grammar_field=name_of_responses(text_request.grammar_field))

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
        text_request = await self._generate_request(asked, context)
        keeping = Keeping(self._responses, asked, tenant)
        response = _object(asked, text_request, Usage(), store=True)
        queued = msgspec.json.encode(response.queued())
        if not keeping.fits(queued):
            raise InvalidRequestError("The conversation is too large to be kept.", param="input")
        size = len(queued) + len(asked.items_json) + OVERHEAD
        background.check_room(tenant, size)  # others have come meanwhile
        own = context.next_request()
        own.record.route = _BACKGROUND_ROUTE
        context.hand_over_to(own)
        generate = partial(self._dataplane.generate, replace(text_request, context=own))
        events = ResponseEvents(response, keeping.end, asked.include, asked.tools)
        begun = BackgroundResponse(own, events, generate, size=size, stream=bool(asked.stream))
        store = self._responses.store
        background.begin(begun, store.keep(tenant, response.id, queued, asked.items_json, asked.previous, is_open=True))
        return begun

    def _respond(
        self, exchange: Exchange, asked: Asked, text_request: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        return self._send(
            exchange, asked, _object(asked, text_request, generation.usage, store=self._kept(asked)), generation
        )

    async def _upstream_chat(self, asked: Asked, context: RequestContext) -> UpstreamChat:
        if asked.request.background:
            message = "background: this model, which is no language model of this server, makes no such responses."
            raise UnsupportedError(message, param="background")
        messages = await self._messages(asked, context)
        if asked.include.logprobs:
            asked.leave_out_logprobs(context, "models of other servers have no logprobs here.")
        if asked.request.truncation == "auto":
            context.ignore("truncation", "models of other servers say themselves what does not fit.")
        return upstream_chat(chat_request(asked.request, asked.tools, asked.include, context), messages)

    def _renamed(self, asked: Asked, model: str) -> Asked:
        return Asked(msgspec.structs.replace(asked.request, model=model), asked.stream)

    def _respond_from(self, exchange: Exchange, asked: Asked, answer: UpstreamAnswer) -> Awaitable[None]:
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
        self, exchange: Exchange, asked: Asked, response: ResponseObject, generation: Generation | UpstreamAnswer
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
        generation: Generation | UpstreamAnswer,
        response: ResponseObject,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        async for deltas in generation:
            for delta in deltas:
                output.add(delta)
        ended = response.ended(output.items, output.finish_reason)
        keep(ended)
        await exchange.respond(200, msgspec.json.encode(ended))


def _object(asked: Asked, text_request: GenerateRequest, usage: Usage, *, store: bool) -> ResponseObject:
    params, tier, record = (
        text_request.params,
        real_tier(asked.request.service_tier, text_request),
        text_request.context.record,
    )
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


class InputTokens(CreateResponse):
    """How long the prompt of a response would be. It takes what `/v1/responses` takes, and makes nothing."""

    kind = Kind.TOKENS

    async def _answer_at_once(self, exchange: Exchange, asked: Asked) -> bool:
        text_request = await self._generate_request(asked, exchange.context)
        count = {"object": "response.input_tokens", "input_tokens": len(text_request.prompts[0])}
        await exchange.respond(200, msgspec.json.encode(count))
        return True
