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
from penstock.gateway.generating.request_reading import JsonBody, parse
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
class Turn:
    """A request, and what it goes on from."""

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

    async def earlier(
        self, responses: ResponseService, context: RequestContext, *, reads_images: bool
    ) -> list[InputItem]:
        """Reads the request, and gives the items that it goes on from. `reads_images`: the model does. Raises
        InvalidRequestError."""
        request, tenant = self.request, context.tenant
        self.include = Include.parse(request.include, context)
        self.tools = response_tools(request, context)
        items = input_items(request.input, context, reads_images=reads_images)
        self.items = await responses.looked_up(items, tenant)
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

    def __init__(self, responses: ResponseService, turn: Turn, tenant: str) -> None:
        self._responses = responses
        self._turn = turn
        self._tenant = tenant

    def keep(self, ended: dict[str, Any]) -> None:
        """Notes in the response when it is too large."""
        if ended["store"]:
            body = _encode(ended)
            ended["store"] = self.fits(body)
            if ended["store"]:
                turn = self._turn
                self._responses.store.keep(self._tenant, ended["id"], body, turn.items_json, turn.previous)
        self._go_on(ended)

    def fits(self, body: bytes) -> bool:
        """Whether a response with this JSON is small enough to be kept."""
        return self._responses.store.fits(len(body) + len(self._turn.items_json), self._turn.previous)

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
        conversation_id = self._turn.request.conversation_id
        if conversation_id is not None and ended["status"] in ("completed", "incomplete"):
            output = [item for item in ended["output"] if not _is_half_a_call(item)]
            items = self._turn.shown_items + output
            self._responses.conversations.append(conversation_id, self._tenant, items)


def _is_half_a_call(item: Mapping[str, Any]) -> bool:
    """Nobody can answer that."""
    return item["type"] in ("function_call", "custom_tool_call") and item["status"] == "incomplete"


_BACKGROUND_ROUTE = "/v1/responses/background"
"""In records: the request itself is answered at once."""


class CreateResponse(TranslatingEndpoint[Turn]):
    def __init__(self, dataplane: DataPlane, settings: AppSettings, responses: ResponseService) -> None:
        super().__init__(dataplane, settings)
        self._responses = responses
        self._stores = responses.store.enabled

    def _parse(self, body: JsonBody) -> Turn:
        request = parse(body, ResponsesRequest, UNSUPPORTED)
        needs_store = {
            "store": request.store,
            "conversation": request.conversation_id is not None,
            "background": request.background,
        }
        for name, is_present in needs_store.items():
            if is_present and not self._stores:
                raise UnsupportedError(f"{name}: this server keeps no responses (--stored-responses).", param=name)
        if request.conversation_id is not None and request.previous_response_id is not None:
            raise InvalidRequestError("conversation and previous_response_id exclude each other.", param="conversation")
        if request.background:
            self._check_background(request)
        return Turn(request, request.stream)

    def _check_background(self, request: ResponsesRequest) -> None:
        """Raises UnsupportedError, InvalidRequestError."""
        if not self._responses.background.enabled:
            message = "background: this server makes no responses in the background (--background-responses)."
            raise UnsupportedError(message, param="background")
        if request.store is False:
            raise InvalidRequestError("store must not be false with background.", param="store")

    def _model_name(self, request: Turn) -> str:
        return request.request.model

    async def _generate_request(self, turn: Turn, context: RequestContext) -> GenerateRequest:
        request = turn.request
        model = self._dataplane.model(request.model, context)
        messages = await self._messages(turn, context, reads_images=model.reads_images)
        chat = chat_request(request, turn.tools, turn.include, context)
        with in_words_of_responses(context.record, turn.tools.places):

            def render(messages: Sequence[dict[str, Any]]) -> Awaitable[GenerateRequest]:
                return chat_generation(self._dataplane, self._settings, chat, list(messages), context)

            if request.truncation == "auto":
                text_request = await truncated(messages, model.info.context_length, request.max_output_tokens, render)
            else:
                text_request = await render(messages)
        if text_request.stages and turn.include.logprobs:
            turn.leave_out_logprobs(context, "this model's answers may have reasoning or calls, which have none here.")
            text_request = replace(text_request, params=msgspec.structs.replace(text_request.params, logprobs=None))
        return replace(text_request, grammar_field=name_of_responses(text_request.grammar_field))

    async def _messages(
        self, turn: Turn, context: RequestContext, *, reads_images: bool = False
    ) -> list[dict[str, Any]]:
        """As chat templates know them, with those that the request goes on from. Raises PenstockError."""
        request = turn.request
        earlier = await turn.earlier(self._responses, context, reads_images=reads_images)
        before = "previous_response_id" if request.conversation_id is None else "conversation"
        return template_messages(
            request.instructions, earlier, turn.items, turn.tools, context, before, reads_images=reads_images
        )

    async def _answer_at_once(self, exchange: Exchange, turn: Turn) -> bool:
        if not turn.request.background:
            return False
        response = await self._begin(exchange.context, turn)
        if response.log is None:
            await exchange.respond(200, msgspec.json.encode(response.shown()))
        else:
            await send_events(exchange, response.log, -1, self._settings.heartbeat_s)
        return True

    async def _begin(self, context: RequestContext, turn: Turn) -> BackgroundResponse:
        """Raises PenstockError."""
        background, tenant = self._responses.background, context.tenant
        background.check_room(tenant)
        text_request = await self._generate_request(turn, context)
        keeping = Keeping(self._responses, turn, tenant)
        response = _object(turn, text_request, Usage(), store=True)
        queued = msgspec.json.encode(response.queued())
        if not keeping.fits(queued):
            raise InvalidRequestError("The conversation is too large to be kept.", param="input")
        size = len(queued) + len(turn.items_json) + OVERHEAD
        background.check_room(tenant, size)  # others have come meanwhile
        own = context.next_request()
        own.record.route = _BACKGROUND_ROUTE
        context.hand_over_to(own)
        generate = partial(self._dataplane.generate, replace(text_request, context=own))
        events = ResponseEvents(response, keeping.end, turn.include, turn.tools)
        begun = BackgroundResponse(own, events, generate, size=size, stream=bool(turn.stream))
        store = self._responses.store
        background.begin(begun, store.keep(tenant, response.id, queued, turn.items_json, turn.previous, is_open=True))
        return begun

    def _respond(
        self, exchange: Exchange, turn: Turn, text_request: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        return self._send(
            exchange, turn, _object(turn, text_request, generation.usage, store=self._kept(turn)), generation
        )

    async def _upstream_chat(self, turn: Turn, context: RequestContext) -> UpstreamChat:
        if turn.request.background:
            message = "background: this model, which is no language model of this server, makes no such responses."
            raise UnsupportedError(message, param="background")
        messages = await self._messages(turn, context)
        if turn.include.logprobs:
            turn.leave_out_logprobs(context, "models of other servers have no logprobs here.")
        if turn.request.truncation == "auto":
            context.ignore("truncation", "models of other servers say themselves what does not fit.")
        return upstream_chat(chat_request(turn.request, turn.tools, turn.include, context), messages)

    def _renamed(self, turn: Turn, model: str) -> Turn:
        return Turn(msgspec.structs.replace(turn.request, model=model), turn.stream)

    def _respond_from(self, exchange: Exchange, turn: Turn, answer: UpstreamAnswer) -> Awaitable[None]:
        request = turn.request
        response = ResponseObject(
            request,
            answer.usage,
            exchange.context.record,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0,
            store=self._kept(turn),
            tier="default",
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
        )
        return self._send(exchange, turn, response, answer)

    def _kept(self, turn: Turn) -> bool:
        return self._stores and turn.request.store is not False

    def _send(
        self, exchange: Exchange, turn: Turn, response: ResponseObject, generation: Generation | UpstreamAnswer
    ) -> Awaitable[None]:
        keep = Keeping(self._responses, turn, exchange.context.tenant).keep
        if not turn.stream:
            output = Output(turn.include, turn.tools, response.id)
            return self._answer(exchange, output, generation, response, keep)
        events = ResponseEvents(response, keep, turn.include, turn.tools)
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


def _object(turn: Turn, text_request: GenerateRequest, usage: Usage, *, store: bool) -> ResponseObject:
    params, tier, record = (
        text_request.params,
        real_tier(turn.request.service_tier, text_request),
        text_request.context.record,
    )
    return ResponseObject(
        turn.request,
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

    async def _answer_at_once(self, exchange: Exchange, turn: Turn) -> bool:
        text_request = await self._generate_request(turn, exchange.context)
        count = {"object": "response.input_tokens", "input_tokens": len(text_request.prompts[0])}
        await exchange.respond(200, msgspec.json.encode(count))
        return True
