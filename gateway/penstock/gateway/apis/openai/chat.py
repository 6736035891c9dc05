"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.engines.errors import UnsupportedError
from penstock.gateway.apis.openai.frames import FormedCallFrames, Frames, NamedCallFrames, PartFrames
from penstock.gateway.apis.openai.messages import (
    echoed_text,
    generation_prompt,
    template_documents,
    template_kwargs,
    template_messages,
)
from penstock.gateway.apis.openai.objects import (
    FUNCTIONS,
    ChatChoice,
    ResponseHead,
    call_forms,
    chat_logprobs,
    chat_usage,
    finish_reason,
    has_call,
    message,
    new_head,
    prompt_logprobs,
    running_usage,
    spliced,
)
from penstock.gateway.apis.openai.schemas import CHAT, ChatMessage, ChatRequest, StreamOptions
from penstock.gateway.apis.openai.tools import tool_use
from penstock.gateway.apis.openai.validation import chat_generate_request, kept_metadata, real_tier, with_metadata
from penstock.gateway.generating.answer_shape import answer_shape, asked_budget
from penstock.gateway.generating.endpoint import GeneratingEndpoint, chat_fields
from penstock.gateway.generating.request_reading import JsonBody, parse
from penstock.gateway.generating.streams import Collected, collect, collecting, stream
from penstock.gateway.models.entries import UpstreamChat
from penstock.gateway.models.language.dataplane import DataPlane, GenerateRequest, Generation, ServedModel
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

if TYPE_CHECKING:
    from penstock.gateway.generating.resumable_streams import ResumableStreams
_NO_REASONING = "this model's chat template shows no reasoning (--reasoning-parser)."


async def chat_generation(
    dataplane: DataPlane,
    settings: AppSettings,
    request: ChatRequest,
    messages: list[dict[str, Any]],
    context: RequestContext,
) -> GenerateRequest:
    """`messages` are as chat templates know them; those of `request` are not read. Raises PenstockError."""
    model = dataplane.model(request.model, context)
    opens, continues = generation_prompt(request)
    use = tool_use(request, context)
    thinks_never = _thinks_never(request, model, context)
    kwargs = template_kwargs(request, model.template_variables, context)
    documents = template_documents(request, model.template_variables)
    text_request = chat_generate_request(request, model, settings, context)
    budget = (
        None
        if thinks_never
        else asked_budget(
            ("thinking_token_budget", request.thinking_token_budget),
            ("max_reasoning_tokens", request.max_reasoning_tokens),
            max_tokens=text_request.params.max_tokens,
        )
    )
    show_reasoning = request.include_reasoning is not False
    shape = answer_shape(model, use, text_request.params.grammar, show_reasoning=show_reasoning, budget=budget)
    prompt = await dataplane.chat_prompt(
        request.model,
        messages,
        context,
        add_generation_prompt=opens,
        continue_final_message=continues,
        tools=use.shown if use.tools else None,
        documents=documents,
        template_kwargs=kwargs,
        cut=text_request.truncation is not None,
        tenant=text_request.tenant,
        cache_salt=text_request.cache_salt,
    )
    return shape.applied(text_request, prompt)


def _thinks_never(request: ChatRequest, model: ServedModel, context: RequestContext) -> bool:
    """Then what a request says about thinking is ignored: a bound of it is kept anyway."""
    if model.parsers.reasoning is not None:
        return False
    for name in ("thinking_token_budget", "max_reasoning_tokens"):
        if getattr(request, name) is not None:
            context.ignore(name, _NO_REASONING)
    if request.reasoning_effort not in (None, "none"):
        context.ignore("reasoning_effort", _NO_REASONING)
    return True


ID_PREFIX = "chatcmpl"
"""Of what chats' answers are called."""


@dataclass(frozen=True, slots=True)
class StoredChat:
    id: str
    model: str
    completion: bytes
    """JSON of the answer, without metadata."""
    messages: bytes
    """JSON of `shown_messages`."""
    metadata: Mapping[str, str]


class ChatKeeper(Protocol):
    @property
    def enabled(self) -> bool:
        """False: nothing is kept."""
        ...

    def keep(self, tenant: str, chat: StoredChat) -> object:
        """Does not wait."""
        ...


def shown_messages(chat_id: str, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The request's messages as OpenAI shows those of a stored chat: with ids, and parts apart from texts."""
    return [_shown(f"{chat_id}-{number}", message) for number, message in enumerate(messages)]


def _shown(message_id: str, message: ChatMessage) -> dict[str, Any]:
    fields = present(msgspec.to_builtins(message))
    content = fields.pop("content", None)
    if "tool_calls" in fields:
        fields["tool_calls"] = [present(call) for call in fields["tool_calls"]]
    in_parts = isinstance(content, list)
    contents = {"content": None if in_parts else content, "content_parts": content if in_parts else None}
    return {"id": message_id, "name": None, **fields, **contents}


_text_frames = partial(Frames, opening=b'"delta":{"content":', closing=b"}")
_part_frames = partial(PartFrames, opening=b'"delta":')
_named_call_frames = partial(NamedCallFrames, opening=b'"delta":')
_formed_call_frames = partial(FormedCallFrames, opening=b'"delta":')


class ChatCompletions(GeneratingEndpoint[ChatRequest]):
    passes_body = True

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

    def _parse(self, body: JsonBody) -> ChatRequest:
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
        messages = template_messages(request.messages, context, model.template_roles, reads_images=model.reads_images)
        return await chat_generation(self._dataplane, self._settings, request, messages, context)

    def _respond(
        self, exchange: Exchange, request: ChatRequest, text_request: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        if request.stream:
            return self._stream(exchange, request, text_request, generation, _frames(request, text_request))
        return self._answer(exchange, request, text_request, generation)

    def _stream(
        self,
        exchange: Exchange,
        request: ChatRequest,
        text_request: GenerateRequest,
        generation: Generation,
        make_frames: Callable[..., Frames],
    ) -> Awaitable[None]:
        options = request.stream_options or StreamOptions()
        count, echoed = request.n or 1, echoed_text(request)
        head = self._head("chat.completion.chunk", request, text_request)
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
        self, exchange: Exchange, request: ChatRequest, text_request: GenerateRequest, generation: Generation
    ) -> None:
        collected = await collect(generation, request.n or 1)
        head = self._head("chat.completion", request, text_request)
        body = self._body(request, head, generation, collected)
        if request.store:
            self._keep(exchange, request, head, body)
        await exchange.respond(200, with_metadata(body, request.metadata) if request.metadata else body)

    def _body(
        self, request: ChatRequest, head: ResponseHead, generation: Generation, collected: Sequence[Collected]
    ) -> bytes:
        """The answer without metadata."""
        extra: dict[str, object] = {}
        if request.return_token_ids:
            extra["prompt_token_ids"] = generation.prompt_token_ids[0]
        if request.prompt_logprobs is not None and generation.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs[0], request.prompt_logprobs)
        choices = [_choice(request, index, choice) for index, choice in enumerate(collected)]
        return spliced(head, choices=choices, usage=chat_usage(generation.usage), **extra)

    def _keep(self, exchange: Exchange, request: ChatRequest, head: ResponseHead, body: bytes) -> None:
        if self._keeper is not None:
            messages = msgspec.json.encode(shown_messages(head.id, request.messages))
            chat = StoredChat(head.id, request.model, body, messages, request.metadata or {})
            self._keeper.keep(exchange.context.tenant, chat)

    def _head(self, kind: str, request: ChatRequest, text_request: GenerateRequest) -> ResponseHead:
        tier: str | msgspec.UnsetType = msgspec.UNSET
        if request.service_tier is not None:
            tier = real_tier(request.service_tier, text_request)
        return new_head(ID_PREFIX, kind, request.model, self._settings.system_fingerprint, tier)


def _frames(request: ChatRequest, text_request: GenerateRequest) -> Callable[..., Frames]:
    if not text_request.stages:
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


def upstream_chat(request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> UpstreamChat:
    """`messages` are as chat templates know them; those of `request` are not read."""
    fields = msgspec.to_builtins(request)
    shows = fields.pop("include_reasoning") is not False
    most = fields.pop("max_completion_tokens")
    if most is not None:
        fields["max_tokens"] = most  # more servers know it by this name
    if request.response_format is not None:
        form = present(fields["response_format"])
        if "json_schema" in form:
            form["json_schema"] = present(form["json_schema"])
        fields["response_format"] = form
    return UpstreamChat(chat_fields(fields, messages), show_reasoning=shows)


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
