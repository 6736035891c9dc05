"""From a request to what the model reads and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.engines.errors import ContextLengthError, InvalidRequestError
from penstock.gateway.anthropic.conversation import continues, template_messages
from penstock.gateway.anthropic.retention import cache_retention
from penstock.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.anthropic.thinking import shows_thoughts, template_kwargs, thinking_budget
from penstock.gateway.anthropic.tools import offered_tools
from penstock.gateway.anthropic.unsupported import note_hints, user_id
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.answer_shape import AnswerShape, answer_shape
from penstock.gateway.generating.fair_tenant import fair_tenant
from penstock.gateway.llm.dataplane import ChatPrompt, DataPlane, GenerateRequest, ServedModel
from penstock.gateway.llm.sampling import SamplingFields, bounded, sampling_params, stop_strings
from penstock.gateway.llm.structured_output import json_schema

_MAX_TOKENS = 2**31 - 1
_COUNTED_BYTES = 16
"""Of a body, for each token of the context. What is longer is not encoded to say how long it is."""
_SMALLEST_PART = 4
"""An answer gets what the context leaves, if that is at least this part of `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given."""

    model: ServedModel
    messages: list[dict[str, Any]]
    continues: bool
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]

    async def prompt(self, dataplane: DataPlane, context: RequestContext) -> ChatPrompt:
        """Of any length, so that it can be told; but for a very long text raises ContextLengthError. Raises as
        `DataPlane.chat_prompt`, too."""
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
            )
        except ContextLengthError:
            message = f"prompt is too long: it does not fit into the maximum of {longest} tokens"
            raise ContextLengthError(message, param="prompt") from None


def read_chat(
    request: CountTokensRequest, model: ServedModel, context: RequestContext, *, max_tokens: int | None = None
) -> tuple[Chat, AnswerShape]:
    """What the model is shown, and what it may answer; `max_tokens` None: nothing. Raises InvalidRequestError,
    UnsupportedError."""
    if not model.has_chat_template:
        raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="model")
    messages = template_messages(request.system, request.messages, context)
    tools = offered_tools(request.tools, request.tool_choice, context)
    asked = request.answer_format
    shape = answer_shape(
        model,
        tools.use,
        None if asked is None else json_schema(asked.schema, _format_field(request)),
        show_reasoning=shows_thoughts(request.thinking),
        budget=None if max_tokens is None else thinking_budget(request.thinking, max_tokens, context, model.parsers),
    )
    kwargs = template_kwargs(request.thinking, request.output_config, model.parsers, context)
    return Chat(model, messages, continues(messages), tools.shown, kwargs), shape


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


def fitted(wanted: GenerateRequest, limit: int) -> GenerateRequest:
    """The request for what a context of `limit` tokens leaves behind its prompt, where that is enough for an answer.
    Raises ContextLengthError in the words of Anthropic's API: Claude Code then shortens the conversation, or asks again
    with smaller `max_tokens`, as it reads these numbers."""
    [prompt], max_tokens = wanted.prompts, wanted.params.max_tokens
    room = limit - len(prompt)
    if room >= max_tokens:
        return wanted
    if room < 1:
        raise ContextLengthError(f"prompt is too long: {len(prompt)} tokens > {limit - 1} maximum", param="prompt")
    if room * _SMALLEST_PART < max_tokens:
        message = (
            f"input length and `max_tokens` exceed context limit: {len(prompt)} + {max_tokens} > {limit}, decrease "
            "input length or `max_tokens` and try again"
        )
        raise ContextLengthError(message, param="max_tokens")
    return replace(wanted, params=msgspec.structs.replace(wanted.params, max_tokens=room))
