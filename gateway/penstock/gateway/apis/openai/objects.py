"""Response objects of the OpenAI API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.gateway.apis.openai.schemas import ChatRequest
from penstock.gateway.apis.openai.tools import custom_input, custom_names
from penstock.gateway.models.language.dataplane import Candidate, Generation, TokenLogprob, Usage
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart


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
    return _usage(generation.usage, 0 if index is None else generation.tokens_of(index))


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


class ResponseHead(msgspec.Struct):
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
) -> ResponseHead:
    return ResponseHead(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model, fingerprint, service_tier)


def spliced(head: ResponseHead, **fields: object) -> bytes:
    """One JSON object: the head's fields, then these."""
    return msgspec.json.encode(head)[:-1] + b"," + msgspec.json.encode(fields)[1:]


_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not know (vLLM's value)."""


class FirstToken(TokenLogprob):
    """A prompt's first token: nothing stands before it, so it has no probability."""


def chat_logprobs(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs([_content(entry) for entry in entries])


def completion_logprobs(entries: Sequence[TokenLogprob], begin: int) -> CompletionLogprobs:
    """The legacy shape: parallel lists. `begin`: where the answer begins in the choice's text, behind its prompt."""
    result = CompletionLogprobs([], [], [], [])
    for entry in entries:
        result.text_offset.append(begin + entry.offset)
        result.tokens.append(entry.token)
        if isinstance(entry, FirstToken):
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            candidates: list[Candidate] = [*entry.top, entry]
            result.token_logprobs.append(_finite(entry.logprob))
            result.top_logprobs.append({candidate.token: _finite(candidate.logprob) for candidate in candidates})
    return result


def prompt_logprobs(entries: Sequence[TokenLogprob | None], count: int) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's shape: of each prompt token, itself and the `count` likeliest by their ids; null for the first."""
    return [None if entry is None else _at_a_place(entry, count) for entry in entries]


def _at_a_place(entry: TokenLogprob, count: int) -> dict[int, PromptLogprob]:
    likeliest = {
        candidate.token_id: PromptLogprob(_finite(candidate.logprob), rank, candidate.token)
        for rank, candidate in enumerate(entry.top[:count], 1)
    }
    return {entry.token_id: PromptLogprob(_finite(entry.logprob), entry.rank, entry.token)} | likeliest


def _content(entry: TokenLogprob) -> ContentLogprob:
    top = [TopLogprob(candidate.token, _finite(candidate.logprob), candidate.bytes) for candidate in entry.top]
    return ContentLogprob(entry.token, _finite(entry.logprob), entry.bytes, top)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


@dataclass(frozen=True, slots=True)
class CallForms:
    """How an answer shows its calls, where that is not as calls of functions."""

    custom: frozenset[str] = frozenset()
    """Names of tools whose calls have a text instead of arguments."""
    older: bool = False
    """The one call is the message's `function_call`, as before there were tools."""


FUNCTIONS = CallForms()


def call_forms(request: ChatRequest) -> CallForms:
    custom = custom_names(request)
    return CallForms(custom, older=request.functions is not None) if custom or request.functions else FUNCTIONS


def message_delta(part: Part) -> dict[str, object]:
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallPart(name=None):
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}
        case _:
            function = {"name": part.name, "arguments": part.arguments}
            call = {"index": part.index, "id": part.id or _new_call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}


def older_delta(part: ToolCallPart) -> dict[str, object]:
    name = {} if part.name is None else {"name": part.name}
    return {"function_call": {**name, "arguments": part.arguments}}


def custom_delta(part: ToolCallPart) -> dict[str, object]:
    """The beginning of a custom tool's call."""
    custom = {"name": part.name, "input": ""}
    call = {"index": part.index, "id": part.id or _new_call_id(), "type": "custom", "custom": custom}
    return {"tool_calls": [call]}


def input_delta(index: int, arguments: str) -> dict[str, object]:
    """The rest of it: its `arguments` are complete."""
    return {"tool_calls": [{"index": index, "custom": {"input": custom_input(arguments)}}]}


def message(text: str, parts: Sequence[Part], forms: CallForms = FUNCTIONS) -> AssistantMessage:
    """`text` is that of the parts, and all there is where stages had nothing to do. A message of tool calls alone has
    no content, as OpenAI's has none."""
    reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningPart)])
    calls = _tool_calls([part for part in parts if isinstance(part, ToolCallPart)], forms.custom)
    shown = AssistantMessage(
        content=None if calls and not text else text,
        reasoning_content=reasoning or msgspec.UNSET,
        reasoning=reasoning or msgspec.UNSET,
    )
    if forms.older and calls and isinstance(calls[0], ToolCallObject):
        shown.function_call = calls[0].function
    elif calls:
        shown.tool_calls = calls
    return shown


def has_call(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, ToolCallPart) for part in parts)


def finish_reason(reason: str | None, *, called: bool, forms: CallForms = FUNCTIONS) -> str | None:
    """A choice that stops after a tool call waits for the tool's answer."""
    if called and reason == "stop":
        return "function_call" if forms.older else "tool_calls"
    return reason


def _tool_calls(parts: Sequence[ToolCallPart], custom: frozenset[str]) -> list[ToolCallObject | CustomCallObject]:
    calls: dict[int, list[ToolCallPart]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return [_tool_call(pieces, custom) for _, pieces in sorted(calls.items())]


def _tool_call(pieces: Sequence[ToolCallPart], custom: frozenset[str]) -> ToolCallObject | CustomCallObject:
    first = pieces[0]
    call_id, name = first.id or _new_call_id(), first.name or ""
    arguments = "".join([piece.arguments for piece in pieces])
    if name in custom:
        return CustomCallObject(call_id, CustomObject(name, custom_input(arguments)))
    return ToolCallObject(call_id, FunctionObject(name, arguments))


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
