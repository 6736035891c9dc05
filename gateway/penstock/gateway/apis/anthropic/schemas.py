"""Requests of the Messages API as this server reads them. Fields that are not here are ignored, unless `unsupported`
names them. Hints and what the history holds may have any type: `Any`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.gateway.requests.context import RequestContext


class Block(msgspec.Struct):
    """Any content block; which of the fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    """An object: what a tool of Anthropic's servers has returned."""
    cache_control: Any = None
    source: Any = None
    title: Any = None
    context: Any = None
    url: Any = None
    tool_name: Any = None


class AnthropicMessage(msgspec.Struct):
    role: str
    content: str | list[Block] | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: Any = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: Any = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What makes a prompt. None: the caller is silent."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    cache_control: Any = None

    @property
    def answer_format(self) -> OutputFormat | None:
        return self.output_format if self.output_config is None else self.output_config.format or self.output_format


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    compaction: Any = None


# Fields of the Messages API that ask for what this server does not do: some are refused, hints are noted. Each has
# the values that ask for nothing.

THREAD = "thread"
"""A conversation that the server keeps."""

UNSUPPORTED: Mapping[str, tuple[str, ...]] = {THREAD: ("null",)}

_HINTS: Mapping[str, tuple[Any, ...]] = {
    "compaction": (None,),
    "container": (None,),
    "context_management": (None, {}, {"edits": []}),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),  # either is what every request gets here
    "speed": (None, "standard"),
}


def note_hints(request: MessagesRequest, context: RequestContext) -> None:
    """Notes the hints that this server does not follow."""
    for name, neutral in _HINTS.items():
        if getattr(request, name) not in neutral:
            context.ignore(name, "this server does not do that.")


def user_id(request: MessagesRequest, context: RequestContext) -> str | None:
    """The only metadata that are used; those of another form are noted."""
    metadata = request.metadata
    user = metadata.get("user_id") if isinstance(metadata, dict) else metadata
    if user is None or (isinstance(metadata, dict) and isinstance(user, str)):
        return user
    context.ignore("metadata", "this is no object with a text as user_id.")
    return None
