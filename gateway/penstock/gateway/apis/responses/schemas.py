"""Requests of the Responses API as this server reads them. Fields that are not here are ignored, unless `unsupported`
names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.engines.errors import UnsupportedError
from penstock.gateway.apis.openai.schemas import CHAT, PromptCacheRetention, ServiceTier, ShortId
from penstock.gateway.models.language.sampling import SamplingFields
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange


class ResponseContentPart(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    image_url: str | None = None
    """Of an `input_image` that the model is shown."""
    detail: str | None = None
    file_id: str | None = None
    """In place of `image_url`: the image is in a file."""

    @property
    def is_image(self) -> bool:
        return bool(self.image_url or self.file_id)


class GivenItem(msgspec.Struct, kw_only=True):
    """An item as a client sends it. History is what a client says has happened, so that nearly any value is decoded;
    `input_items` makes an InputItem of it."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: Any = None
    summary: Any = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    encrypted_content: str | None = None
    # Of calls of tools that other servers have run:
    action: Any = None
    operation: Any = None
    code: Any = None
    queries: Any = None
    outputs: Any = None
    result: Any = None
    results: Any = None
    error: Any = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item as it is kept and shown to models: a message, a thought, a call of a function or a custom tool, or the
    output of one. `item_reference` stands for one that is kept, until it is looked up."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[ResponseContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    """Of a call of a custom tool."""
    output: str | list[ResponseContentPart] | None = None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")


class Reasoning(msgspec.Struct):
    effort: str | None = None
    """Hints: a word that this server does not know is one that newer clients have."""
    summary: str | None = None
    generate_summary: str | None = None
    """The older name of `summary`."""


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ConversationName(msgspec.Struct):
    id: str


class ResponsesRequest(SamplingFields, kw_only=True):
    """OpenAI's fields, and those of vLLM that change how tokens are sampled. None: the caller is silent."""

    model: str
    input: str | list[GivenItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: ShortId | None = None
    prompt_cache_key: ShortId | None = None
    prompt_cache_retention: PromptCacheRetention | None = None
    service_tier: ServiceTier | None = None
    priority: int | None = None
    cache_salt: str | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    max_reasoning_tokens: int | None = None

    @property
    def conversation_id(self) -> str | None:
        name = self.conversation
        return name.id if isinstance(name, ConversationName) else name


_NOTHING = ("null",)

UNSUPPORTED: Mapping[str, tuple[str, ...]] = dict(CHAT) | {
    "access_programs": _NOTHING,
    "audio": _NOTHING,
    "background_options": _NOTHING,
    "best_of": ("null", "1"),
    "echo": ("null", "false"),
    "function_call": ("null", '"none"'),
    "functions": _NOTHING,
    "image": _NOTHING,
    "logprobs": ("null", "false"),
    "max_completion_tokens": _NOTHING,
    "max_tokens": _NOTHING,
    "messages": _NOTHING,
    "moderation": _NOTHING,
    "n": ("null", "1"),
    "prediction": _NOTHING,
    "prompt": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "reasoning_effort": _NOTHING,
    "response_format": _NOTHING,
    "stream_options": ("null", "{}", '{"include_obfuscation":false}'),
    "truncate_prompt_tokens": _NOTHING,
    "web_search_options": _NOTHING,
}


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class Include:
    """What the items of a response have beside what they always have."""

    logprobs: bool = False
    encrypted_reasoning: bool = False

    @staticmethod
    def parse(names: Sequence[str] | None, context: RequestContext) -> Include:
        """What there is not is left out, and `context` notes it."""
        if not names:
            return NOTHING
        if not {LOGPROBS, ENCRYPTED_REASONING}.issuperset(names):
            context.ignore("include", f"there are only {LOGPROBS} and {ENCRYPTED_REASONING}.")
        return Include(LOGPROBS in names, ENCRYPTED_REASONING in names)


NOTHING = Include()


DEFAULT_PAGE, LONGEST_PAGE = 20, 100


def checked_query(exchange: Exchange) -> Mapping[str, str]:
    """Raises InvalidRequestError, UnsupportedError."""
    query = exchange.query
    include = Include.parse(query.getlist("include") + query.getlist("include[]"), exchange.context)
    if include.encrypted_reasoning:
        exchange.context.ignore("include", f"{ENCRYPTED_REASONING} is only for requests that make a response.")
    if query.get("include_obfuscation", "false") != "false":
        raise UnsupportedError("include_obfuscation is not supported.", param="include_obfuscation")
    return query
