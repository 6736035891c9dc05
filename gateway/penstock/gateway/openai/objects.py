"""Response objects of the OpenAI API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec

from penstock.gateway.llm.dataplane import Generation, Usage


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageObject(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage_object(usage: Usage) -> UsageObject:
    return _usage(usage, usage.completion_tokens)


def chat_usage(usage: Usage) -> UsageObject:
    shown = usage_object(usage)
    shown.completion_tokens_details = CompletionTokensDetails(
        usage.reasoning_tokens, usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
    )
    return shown


def running_usage(generation: Generation, index: int | None) -> UsageObject:
    """What one choice has used so far; None for one that has not begun."""
    return _usage(generation.usage, 0 if index is None else generation.usage_by_choice[index])


def _usage(usage: Usage, completion_tokens: int) -> UsageObject:
    total = usage.prompt_tokens + completion_tokens
    return UsageObject(usage.prompt_tokens, completion_tokens, total, PromptTokensDetails(usage.cached_tokens))


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


class FunctionObject(msgspec.Struct):
    name: str
    arguments: str


class ToolCallObject(msgspec.Struct):
    id: str
    function: FunctionObject
    type: str = "function"


class CustomObject(msgspec.Struct):
    name: str
    input: str


class CustomCallObject(msgspec.Struct):
    id: str
    custom: CustomObject
    type: str = "custom"


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same again: clients know it under either name."""
    tool_calls: Sequence[ToolCallObject | CustomCallObject] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionObject | msgspec.UnsetType = msgspec.UNSET
    """The older form."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class Head(msgspec.Struct):
    """The first fields of every response and of every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    """The real one, where the request names one."""


def new_head(
    prefix: str, kind: str, model: str, fingerprint: str, service_tier: str | msgspec.UnsetType = msgspec.UNSET
) -> Head:
    return Head(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model, fingerprint, service_tier)


def spliced(head: Head, **fields: object) -> bytes:
    """One JSON object: the head's fields, then these."""
    return msgspec.json.encode(head)[:-1] + b"," + msgspec.json.encode(fields)[1:]
