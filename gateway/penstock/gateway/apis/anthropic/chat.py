"""Chats of the Messages API: what the model reads of a request, and what it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.engines.errors import ContextLengthError, InvalidRequestError
from penstock.gateway.apis.anthropic.conversation import continues, template_messages
from penstock.gateway.apis.anthropic.schemas import (
    Block,
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    Thinking,
    note_hints,
    user_id,
)
from penstock.gateway.apis.anthropic.tools import offered_tools
from penstock.gateway.generating.answer_shape import AnswerShape, AskedBudget, answer_shape, asked_budget
from penstock.gateway.generating.request_reading import fair_tenant
from penstock.gateway.models.language.dataplane import ChatPrompt, DataPlane, GenerateRequest, ServedModel
from penstock.gateway.models.language.models import ModelParsers
from penstock.gateway.models.language.sampling import SamplingFields, bounded, sampling_params, stop_strings
from penstock.gateway.models.language.structured_output import json_schema
from penstock.gateway.requests.context import RequestContext

# Whether and how hard the model is to think, as chat templates are told. How long it may is a constraint where it
# thinks; all else is a hint.

ENABLED = {"enabled": True, "adaptive": True, "disabled": False}
_BUDGET = "thinking.budget_tokens"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_DISPLAYS = (None, "summarized", "omitted")
_NOT_SHOWN = "this model's chat template shows no reasoning (--reasoning-parser)."


def template_kwargs(
    thinking: Thinking | None, output: OutputConfig | None, parsers: ModelParsers, context: RequestContext
) -> dict[str, Any]:
    """A model that does not think may answer, too."""
    kwargs: dict[str, Any] = {}
    if thinking is not None:
        check_thinking(thinking, context)
        if thinking.type == "enabled" and parsers.reasoning is None:
            context.ignore("thinking", _NOT_SHOWN)
        elif thinking.type in ENABLED:
            kwargs["enable_thinking"] = ENABLED[thinking.type]
    effort = asked_effort(output, context)
    if effort is not None and parsers.reasoning is not None:
        kwargs["reasoning_effort"] = effort
    elif effort is not None:
        context.ignore("output_config.effort", _NOT_SHOWN)
    return kwargs


def check_thinking(thinking: Thinking, context: RequestContext) -> None:
    """Notes values that this server does not know."""
    if thinking.type not in ENABLED:
        context.ignore("thinking.type", "it is enabled, adaptive or disabled.")
    if thinking.display not in _DISPLAYS:
        context.ignore("thinking.display", "it is summarized or omitted.")


def asked_effort(output: OutputConfig | None, context: RequestContext) -> str | None:
    """None, too, for one that this server does not know, which is noted."""
    effort = None if output is None else output.effort
    if effort is None or (isinstance(effort, str) and effort in _EFFORTS):
        return effort
    context.ignore("output_config.effort", f"it is one of {', '.join(_EFFORTS)}.")
    return None


def shows_thoughts(thinking: Thinking | None) -> bool:
    return thinking is None or thinking.display != "omitted"


def thinking_budget(
    thinking: Thinking | None, max_tokens: int, context: RequestContext, parsers: ModelParsers | None = None
) -> AskedBudget | None:
    """None: no bound, one that `max_tokens` keeps by itself, or one for a model that does not think. `parsers` None:
    another server's model, which may. Raises InvalidRequestError."""
    if thinking is None or thinking.budget_tokens is None:
        return None
    if parsers is not None and parsers.reasoning is None:
        context.ignore(_BUDGET, _NOT_SHOWN)
        return None
    if thinking.type == "disabled":
        context.ignore(_BUDGET, "there is no thought to bound.")
        return None
    return asked_budget((_BUDGET, thinking.budget_tokens), max_tokens=max_tokens)


_SECONDS = {None: 5 * 60, "5m": 5 * 60, "1h": 60 * 60}


def cache_retention(request: MessagesRequest, context: RequestContext) -> int:
    """In seconds: the longest that any `cache_control` names, for the whole prompt; 0 without any. One that is not of
    Anthropic's form is noted, and keeps nothing longer."""
    return max((_seconds(control, context) for control in _controls(request) if control is not None), default=0)


def _seconds(control: Any, context: RequestContext) -> int:
    is_known = isinstance(control, dict) and control.get("type") == "ephemeral"
    ttl = control.get("ttl") if is_known else ""
    if isinstance(ttl, str | None) and ttl in _SECONDS:
        return _SECONDS[ttl]
    context.ignore("cache_control", "its type is ephemeral, its ttl 5m or 1h.")
    return 0


def _controls(request: MessagesRequest) -> Iterator[Any]:
    yield request.cache_control
    for tool in request.tools or ():
        yield tool.get("cache_control")
    for content in (request.system, *(message.content for message in request.messages)):
        if isinstance(content, list):
            yield from _of_blocks(content)


def _of_blocks(blocks: Iterable[Block]) -> Iterator[Any]:
    """A tool's result has blocks of its own; those further below are not read."""
    for block in blocks:
        yield block.cache_control
        if isinstance(block.content, list):
            for inner in block.content:
                yield inner.cache_control


_MAX_TOKENS = 2**31 - 1
_COUNTED_BYTES = 16
"""Of a body, for each token of the context. What is longer is not encoded to say how long it is."""
_SMALLEST_PART = 4
"""An answer gets what the context leaves, if that is at least this part of `max_tokens`."""


@dataclass(frozen=True, slots=True)
class AnthropicChat:
    """What a chat template is given."""

    model: ServedModel
    messages: list[dict[str, Any]]
    continues: bool
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]

    async def prompt(self, dataplane: DataPlane, context: RequestContext, tenant: str = "") -> ChatPrompt:
        """Of any length, so that it can be told; but for a very long text raises ContextLengthError. `tenant`, and what
        else is raised: as `DataPlane.chat_prompt`."""
        longest = self.model.info.context_length - 1
        try:
            return await dataplane.chat_prompt(
                self.model.name,
                self.messages,
                context,
                add_generation_prompt=not self.continues,
                continue_final_message=self.continues,
                tools=self.tools,
                template_kwargs=self.template_kwargs,
                cut=context.record.bytes_in <= _COUNTED_BYTES * longest,
                tenant=tenant,
            )
        except ContextLengthError:
            message = f"prompt is too long: it does not fit into the maximum of {longest} tokens"
            raise ContextLengthError(message, param="prompt") from None


def read_chat(
    request: CountTokensRequest, model: ServedModel, context: RequestContext, *, max_tokens: int | None = None
) -> tuple[AnthropicChat, AnswerShape]:
    """What the model is shown, and what it may answer; `max_tokens` None: nothing. Raises InvalidRequestError,
    UnsupportedError."""
    if not model.has_chat_template:
        raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="model")
    messages = template_messages(request.system, request.messages, context, reads_images=model.reads_images)
    tools = offered_tools(request.tools, request.tool_choice, context)
    answer_format = request.answer_format
    shape = answer_shape(
        model,
        tools.use,
        None if answer_format is None else json_schema(answer_format.schema, _format_field(request)),
        show_reasoning=shows_thoughts(request.thinking),
        budget=None if max_tokens is None else thinking_budget(request.thinking, max_tokens, context, model.parsers),
    )
    kwargs = template_kwargs(request.thinking, request.output_config, model.parsers, context)
    return AnthropicChat(model, messages, continues(messages), tools.shown, kwargs), shape


def _format_field(request: CountTokensRequest) -> str:
    has_older_name = request.output_config is None or request.output_config.format is None
    return "output_format.schema" if has_older_name else "output_config.format.schema"


def generate_request(
    request: MessagesRequest, model: ServedModel, policy: str, context: RequestContext
) -> GenerateRequest:
    """What is asked for, still without its prompt, of a request that `read_chat` has checked. Raises
    InvalidRequestError, UnsupportedError."""
    max_tokens = bounded(request.max_tokens, "max_tokens", 1, _MAX_TOKENS)
    fields = SamplingFields(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k)
    note_hints(request, context)
    return GenerateRequest(
        model=request.model,
        prompts=[[]],
        params=sampling_params(fields, model.info, model.default_params, max_tokens=max_tokens, logprobs=None),
        grammar_field=None if request.answer_format is None else _format_field(request),
        stop=stop_strings(request.stop_sequences, "stop_sequences"),
        add_special_tokens=False,
        context=context,
        tenant=fair_tenant(context, user_id(request, context), policy),
        cache_retention=cache_retention(request, context),
    )


def fitted(text_request: GenerateRequest, limit: int) -> GenerateRequest:
    """The request for what a context of `limit` tokens leaves behind its prompt, where that is enough for an answer.
    Raises ContextLengthError in the words of Anthropic's API: Claude Code then shortens the conversation, or asks again
    with smaller `max_tokens`, as it reads these numbers."""
    [prompt], max_tokens = text_request.prompts, text_request.params.max_tokens
    room = limit - len(prompt)
    if room >= max_tokens:
        return text_request
    if room < 1:
        raise ContextLengthError(f"prompt is too long: {len(prompt)} tokens > {limit - 1} maximum", param="prompt")
    if room * _SMALLEST_PART < max_tokens:
        message = (
            f"input length and `max_tokens` exceed context limit: {len(prompt)} + {max_tokens} > {limit}, decrease "
            "input length or `max_tokens` and try again"
        )
        raise ContextLengthError(message, param="max_tokens")
    return replace(text_request, params=msgspec.structs.replace(text_request.params, max_tokens=room))
