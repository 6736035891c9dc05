"""POST /v1/messages."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.anthropic.answers import MessageEvents, content_blocks, message_object, new_id, stop_fields
from penstock.gateway.apis.anthropic.chat import (
    ENABLED,
    asked_effort,
    check_thinking,
    fitted,
    generate_request,
    read_chat,
    shows_thoughts,
    thinking_budget,
)
from penstock.gateway.apis.anthropic.conversation import continues, template_messages
from penstock.gateway.apis.anthropic.schemas import (
    UNSUPPORTED,
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    note_hints,
    user_id,
)
from penstock.gateway.apis.anthropic.tools import OfferedTools, offered_tools
from penstock.gateway.generating.endpoint import TranslatingEndpoint, chat_fields
from penstock.gateway.generating.request_reading import JsonBody, RequestReader, default_model, parse
from penstock.gateway.generating.streams import collect, stream
from penstock.gateway.models.entries import Kind, UpstreamAnswer, UpstreamChat
from penstock.gateway.models.language.dataplane import DataPlane, GenerateRequest, Generation
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import Part, TextPart, ToolCallPart


def upstream_chat(request: MessagesRequest, context: RequestContext) -> UpstreamChat:
    """Raises InvalidRequestError, and UnsupportedError for what OpenAI's API cannot say."""
    messages = template_messages(request.system, request.messages, context)
    if continues(messages):
        message = "messages: the answer of the other server's model cannot go on with an assistant's message."
        raise UnsupportedError(message, param="messages")
    if request.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1.", param="max_tokens")
    note_hints(request, context)
    fields = {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": user_id(request, context),
        **_tool_fields(request, offered_tools(request.tools, request.tool_choice, context)),
        **_thinking_fields(request, context),
        "reasoning_effort": asked_effort(request.output_config, context),
        **_format_fields(request.answer_format),
    }
    return UpstreamChat(chat_fields(fields, messages), show_reasoning=shows_thoughts(request.thinking))


def _tool_fields(request: MessagesRequest, offered: OfferedTools) -> dict[str, Any]:
    if not offered.shown:
        return {}
    for shown, tool in zip(offered.shown, offered.definitions, strict=True):
        if tool.strict is not None:
            shown["function"]["strict"] = tool.strict
    use = offered.use
    choice: Any = "required" if use.is_forced else "auto"
    if use.is_named:
        choice = {"type": "function", "function": {"name": use.tools[0].name}}
    disabled = request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
    return {"tools": offered.shown, "tool_choice": choice, "parallel_tool_calls": False if disabled else None}


def _thinking_fields(request: MessagesRequest, context: RequestContext) -> dict[str, Any]:
    """`adaptive` is what servers do anyway. OpenAI has no field for the rest; vLLM and others have these."""
    thinking = request.thinking
    if thinking is None:
        return {}
    check_thinking(thinking, context)
    budget = thinking_budget(thinking, request.max_tokens, context)
    is_said = thinking.type in ENABLED and thinking.type != "adaptive"
    kwargs = {"enable_thinking": ENABLED[thinking.type]} if is_said else None
    return {"chat_template_kwargs": kwargs, "thinking_token_budget": None if budget is None else budget.tokens}


def _format_fields(answer: OutputFormat | None) -> dict[str, Any]:
    if answer is None:
        return {}
    schema = {"name": "answer", "schema": answer.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class Messages(TranslatingEndpoint[MessagesRequest]):
    def _parse(self, body: JsonBody) -> MessagesRequest:
        return parse(body, MessagesRequest, UNSUPPORTED)

    def _model_name(self, request: MessagesRequest) -> str:
        return request.model

    async def _generate_request(self, request: MessagesRequest, context: RequestContext) -> GenerateRequest:
        model = self._dataplane.model(request.model, context)
        chat, shape = read_chat(request, model, context, max_tokens=request.max_tokens)
        text_request = generate_request(request, model, self._settings.policy, context)
        prompt = await chat.prompt(self._dataplane, context, text_request.tenant)
        return fitted(shape.applied(text_request, prompt), model.info.context_length)

    async def _upstream_chat(self, request: MessagesRequest, context: RequestContext) -> UpstreamChat:
        return upstream_chat(request, context)

    def _renamed(self, request: MessagesRequest, model: str) -> MessagesRequest:
        return msgspec.structs.replace(request, model=model)

    def _respond(
        self, exchange: Exchange, request: MessagesRequest, text_request: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        cut = text_request.params.max_tokens < request.max_tokens
        return self._shown(exchange, request, generation, cut=cut)

    def _respond_from(self, exchange: Exchange, request: MessagesRequest, answer: UpstreamAnswer) -> Awaitable[None]:
        return self._shown(exchange, request, answer, cut=False)

    def _shown(
        self, exchange: Exchange, request: MessagesRequest, generation: Generation | UpstreamAnswer, *, cut: bool
    ) -> Awaitable[None]:
        if not request.stream:
            return self._answer(exchange, request, generation, cut)
        events = MessageEvents(request.model, generation.usage, cut=cut)
        return stream(exchange, generation, events, opening=events.opening, ending=events.ending)

    async def _answer(
        self, exchange: Exchange, request: MessagesRequest, generation: Generation | UpstreamAnswer, cut: bool
    ) -> None:
        [collected] = await collect(generation, 1)
        parts: list[Part] = collected.parts or ([TextPart(collected.text)] if collected.text else [])
        called = any(isinstance(part, ToolCallPart) for part in parts)
        message = message_object(new_id("msg"), request.model, content_blocks(parts), generation.usage)
        message.update(stop_fields(collected.finish_reason, collected.stop_reason, called=called, cut=cut))
        await exchange.respond(200, msgspec.json.encode(message))


class CountTokens:
    """How long the prompt of a message would be."""

    def __init__(self, dataplane: DataPlane, settings: AppSettings) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._reader = RequestReader(
            dataplane.models,
            partial(parse, kind=CountTokensRequest, unsupported=UNSUPPORTED),
            attrgetter("model"),
            lambda context: default_model(settings, context, dataplane.models),
        )

    async def handle(self, exchange: Exchange) -> None:
        with exchange.call() as call:
            body = await exchange.body(self._settings.max_body_bytes, from_curl=True)
            request = await self._reader.read(exchange, body)
            if request is None:
                return
            call.watch()
            exchange.read_deadline()
            await self._dataplane.models.find(request.model, Kind.TOKENS, exchange.context)
            model = self._dataplane.model(request.model, exchange.context)
            chat, _ = read_chat(request, model, exchange.context)
            prompt = await chat.prompt(self._dataplane, exchange.context)
            await exchange.respond(200, msgspec.json.encode({"input_tokens": len(prompt.token_ids)}))
