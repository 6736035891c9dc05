"""Requests of the OpenAI API as this server reads them.

Ranges, and options that it does not offer, are checked in `sampling` and `validation`; fields that neither OpenAI nor
vLLM knows are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.gateway.models.language.prompts import Side
from penstock.gateway.models.language.sampling import SamplingFields

ServiceTier = str
"""auto, default, flex, scale, priority or fast; others are hints that this server does not know."""
Verbosity = str
"""low, medium or high; others as for ServiceTier."""
ShortId = str
"""What a client makes up to name a user or a cache."""
PromptCacheRetention = str
"""in_memory or 24h; others as for ServiceTier. OpenAI's client has had the spelling in-memory, too."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """True is ignored."""


class CommonRequest(SamplingFields, kw_only=True):
    """What chat and text completions share. None: the caller is silent, so the model's default holds."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    """Text completions: the prompt comes first. Chats: the last message does, if the answer continues it."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    audio: Any = None
    """A hint, as all that follow: noted as ignored where they ask for something (`validation.note_hints`)."""
    guided_decoding_backend: Any = None
    length_penalty: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    moderation: Any = None
    stream_interval: Any = None
    web_search_options: Any = None


class ContentPart(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    file: dict[str, Any] | None = None
    image_url: Any = None
    """A URL, or an object with one and `detail`."""
    detail: Any = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Any = None
    """As JSON, or as an object; whatever a model has written."""


class CustomCall(msgspec.Struct):
    name: str
    input: str | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What the assistant thought; `reasoning` is the same."""
    reasoning: str | None = None
    function_call: FunctionCall | None = None
    """The older form of `tool_calls`."""
    audio: dict[str, Any] | None = None
    """What the assistant has said; of it only a `transcript` is read."""
    refusal: str | None = None


class Prediction(msgspec.Struct):
    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join([part.text or "" for part in parts])


class ChatRequest(CommonRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    """What chat templates for retrieval show to the model."""
    tools: list[dict[str, Any]] | None = None
    """As they were sent: chat templates show them to the model."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    """The older form of `tools`."""
    function_call: str | dict[str, Any] | None = None
    """That of `tool_choice`."""
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    max_reasoning_tokens: int | None = None
    """The same by another name."""
    prediction: Prediction | None = None
    """What the answer is expected to be."""
    verbosity: Verbosity | None = None
    service_tier: ServiceTier | None = None
    metadata: Any = None
    """Texts by name, shown again in the answer as far as OpenAI's bounds allow."""
    store: bool | None = None
    """Whether the chat is kept."""
    safety_identifier: ShortId | None = None
    """The newer name of `user`."""
    prompt_cache_key: ShortId | None = None
    """The prefix cache finds equal beginnings by itself; it says only that there will be more of them."""
    prompt_cache_retention: PromptCacheRetention | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    """What stands behind the text that is to be filled in."""
    logprobs: int | None = None
    prediction: Any = None
    """Hints of chats, as what follows."""
    reasoning_effort: Any = None
    thinking_token_budget: int | None = None
    max_reasoning_tokens: int | None = None


# Options that OpenAI's, vLLM's or SGLang's API knows and this server does not offer.
#
# Ignoring one silently would give an answer to another question (unconstrained text where a schema was asked for), so
# each is refused by name, except at a value that asks for nothing. Those that change nothing of the answer are hints:
# requests have fields for them (`schemas`), and `note_hints` says that they are ignored.

_NOTHING = ("null",)
_OFF = ("null", "false")
_EMPTY = ("null", "[]", "{}")

_BOTH: dict[str, tuple[str, ...]] = {
    "ebnf": _NOTHING,
    "ec_transfer_params": _NOTHING,
    "grammar": _NOTHING,
    "guided_decoding": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "json_schema": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "logprob_token_ids": _EMPTY,
    "logprobs_mode": _NOTHING,
    "no_stop_trim": _OFF,
    "prompt_embeds": _NOTHING,
    "regex": _NOTHING,
    "repetition_detection": _NOTHING,
    "return_hidden_states": _OFF,
    "return_prompt_text": _OFF,
    "return_token_offsets": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "stop_regex": _NOTHING,
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
}

CHAT: Mapping[str, tuple[str, ...]] = _BOTH | {
    "add_special_tokens": _OFF,
    "chat_template": _NOTHING,
    "modalities": ("null", '["text"]'),
    "separate_reasoning": ("null", "true"),
    "stream_reasoning": ("null", "true"),
    "suffix": _NOTHING,
}

COMPLETION: Mapping[str, tuple[str, ...]] = _BOTH | {
    "function_call": ("null", '"none"', '"auto"'),
    "functions": _EMPTY,
    "modalities": ("null", '["text"]'),
    "tool_choice": ("null", '"none"', '"auto"'),
    "tools": _EMPTY,
    "top_logprobs": ("null", "0"),
}
"""With fields of chats that would change the answer."""
