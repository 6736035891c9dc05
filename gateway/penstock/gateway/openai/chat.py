"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.engines.errors import UnsupportedError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.endpoint import GeneratingEndpoint
from penstock.gateway.generating.streams import Collected, collect, collecting, stream
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane, GenerateRequest, Generation
from penstock.gateway.openai.chat_generation import chat_generation
from penstock.gateway.openai.frames import Frames
from penstock.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from penstock.gateway.openai.message_parts import FUNCTIONS, call_forms, finish_reason, has_call, message
from penstock.gateway.openai.messages import echoed_text, template_messages
from penstock.gateway.openai.metadata import kept_metadata, with_metadata
from penstock.gateway.openai.objects import ChatChoice, Head, chat_usage, new_head, running_usage, spliced
from penstock.gateway.openai.part_frames import FormedCallFrames, NamedCallFrames, PartFrames
from penstock.gateway.openai.schemas import ChatRequest, StreamOptions
from penstock.gateway.openai.service_tier import real_tier
from penstock.gateway.openai.stored_chat import ID_PREFIX, ChatKeeper, StoredChat, shown_messages
from penstock.gateway.openai.unsupported import CHAT

if TYPE_CHECKING:
    from penstock.gateway.generating.resumable_streams import ResumableStreams

_text_frames = partial(Frames, opening=b'"delta":{"content":', closing=b"}")
_part_frames = partial(PartFrames, opening=b'"delta":')
_named_call_frames = partial(NamedCallFrames, opening=b'"delta":')
_formed_call_frames = partial(FormedCallFrames, opening=b'"delta":')


class ChatCompletions(GeneratingEndpoint[ChatRequest]):
    text_api = "chat"

    def __init__(
        self,
        dataplane: DataPlane,
        settings: AppSettings,
        keeper: ChatKeeper | None = None,
        resumable: ResumableStreams | None = None,
    ) -> None:
        """Without a keeper no chats are kept, because their answers are in a file."""
        super().__init__(dataplane, settings, resumable)
        self._keeper = keeper

    def _parse(self, body: bytes) -> ChatRequest:
        request = parse(body, ChatRequest, CHAT)
        if request.store and self._keeper is None:
            raise UnsupportedError("store: lines of batches are not kept.", param="store")
        if request.store and self._keeper is not None and not self._keeper.enabled:
            raise UnsupportedError("store: this server keeps no chats (--stored-responses).", param="store")
        return request

    def _model_name(self, request: ChatRequest) -> str:
        return request.model

    async def _generate_request(self, request: ChatRequest, context: RequestContext) -> GenerateRequest:
        model = self._dataplane.model(request.model, context)
        request.metadata = kept_metadata(request.metadata, context)
        messages = template_messages(request.messages, context, model.template_roles)
        return await chat_generation(self._dataplane, self._settings, request, messages, context)

    def _respond(
        self, exchange: Exchange, request: ChatRequest, wanted: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        if request.stream:
            return self._stream(exchange, request, wanted, generation, _frames(request, wanted))
        return self._answer(exchange, request, wanted, generation)

    def _stream(
        self,
        exchange: Exchange,
        request: ChatRequest,
        wanted: GenerateRequest,
        generation: Generation,
        make_frames: Callable[..., Frames],
    ) -> Awaitable[None]:
        options = request.stream_options or StreamOptions()
        count, echoed = request.n or 1, echoed_text(request)
        head = self._head("chat.completion.chunk", request, wanted)
        collected = [Collected() for _ in range(count)]
        frames = make_frames(
            head,
            count,
            logprobs=(lambda _, entries: chat_logprobs(entries)) if request.logprobs else None,
            extra=(lambda delta: {"token_ids": delta.token_ids}) if request.return_token_ids else None,
            usage=partial(running_usage, generation) if options.continuous_usage_stats else None,
            announce_usage=bool(options.include_usage),
        )

        def roles() -> bytes:
            prompt = generation.prompt_token_ids[0] if request.return_token_ids else None
            opened = b"".join(frames.role(index, prompt) for index in range(count))
            return opened + b"".join(frames.text(index, echoed) for index in range(count) if echoed)

        def ending() -> bytes:
            if request.store:
                whole = msgspec.structs.replace(head, object="chat.completion")
                self._keep(exchange, request, whole, self._body(request, whole, generation, collected))
            return frames.end(chat_usage(generation.usage) if options.include_usage else None)

        deltas = collecting(generation, collected) if request.store else generation
        return stream(exchange, deltas, frames, opening=roles, ending=ending)

    async def _answer(
        self, exchange: Exchange, request: ChatRequest, wanted: GenerateRequest, generation: Generation
    ) -> None:
        collected = await collect(generation, request.n or 1)
        head = self._head("chat.completion", request, wanted)
        body = self._body(request, head, generation, collected)
        if request.store:
            self._keep(exchange, request, head, body)
        await exchange.respond(200, with_metadata(body, request.metadata) if request.metadata else body)

    def _body(self, request: ChatRequest, head: Head, generation: Generation, collected: Sequence[Collected]) -> bytes:
        """The answer without metadata."""
        extra: dict[str, object] = {}
        if request.return_token_ids:
            extra["prompt_token_ids"] = generation.prompt_token_ids[0]
        if request.prompt_logprobs is not None and generation.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs[0], request.prompt_logprobs)
        choices = [_choice(request, index, each) for index, each in enumerate(collected)]
        return spliced(head, choices=choices, usage=chat_usage(generation.usage), **extra)

    def _keep(self, exchange: Exchange, request: ChatRequest, head: Head, body: bytes) -> None:
        if self._keeper is not None:
            messages = msgspec.json.encode(shown_messages(head.id, request.messages))
            chat = StoredChat(head.id, request.model, body, messages, request.metadata or {})
            self._keeper.keep(exchange.context.tenant, chat)

    def _head(self, kind: str, request: ChatRequest, wanted: GenerateRequest) -> Head:
        tier: str | msgspec.UnsetType = msgspec.UNSET
        if request.service_tier is not None:
            tier = real_tier(request.service_tier, wanted)
        return new_head(ID_PREFIX, kind, request.model, self._settings.system_fingerprint, tier)


def _frames(request: ChatRequest, wanted: GenerateRequest) -> Callable[..., Frames]:
    if not wanted.stages:
        return _text_frames
    forms, named = call_forms(request), _names_tool(request)
    if forms != FUNCTIONS:
        return partial(_formed_call_frames, forms=forms, reports_calls=not named)
    return _named_call_frames if named else _part_frames


def _choice(request: ChatRequest, index: int, collected: Collected) -> ChatChoice:
    forms = call_forms(request)
    called = has_call(collected.parts) and not _names_tool(request)
    return ChatChoice(
        index=index,
        message=message(echoed_text(request) + collected.text, collected.parts, forms),
        logprobs=chat_logprobs(collected.logprobs) if request.logprobs else None,
        finish_reason=finish_reason(collected.finish_reason, called=called, forms=forms),
        stop_reason=collected.stop_reason,
        token_ids=collected.token_ids if request.return_token_ids else msgspec.UNSET,
    )


def _names_tool(request: ChatRequest) -> bool:
    choice = request.function_call if request.functions else request.tool_choice
    return isinstance(choice, dict) and not choice.keys().isdisjoint(("function", "custom", "name"))
