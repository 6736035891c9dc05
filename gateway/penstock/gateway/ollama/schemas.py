"""Requests of Ollama's API as this server reads them. What Ollama does not know is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.gateway.pooling.schemas import GivenInput, PoolingRequest

Think = bool | Literal["low", "medium", "high"]
Format = Literal["", "json"] | dict[str, Any]
"""A dict: the JSON schema of the answer."""


class Options(msgspec.Struct, kw_only=True):
    """Those about the machine (`num_gpu`, `num_thread`, `use_mmap` ...) are the operator's here, and are ignored."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    """-1 and -2: what the context leaves."""
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class ToolCall(msgspec.Struct):
    function: CalledFunction


class Message(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None


class _GeneratingRequest(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = True
    options: Options | None = None
    format: Format | None = None
    think: Think | None = None
    keep_alive: float | str | None = None
    """`keep_alive.keep`."""


class ChatRequest(_GeneratingRequest, kw_only=True):
    messages: list[Message] = []
    """Empty: the model is to be loaded, which it is."""
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(_GeneratingRequest, kw_only=True):
    prompt: str = ""
    """Empty: the model is to be loaded, which it is."""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    """The prompt is what the model reads, without its chat template."""


class EmbedRequest(PoolingRequest, kw_only=True):
    input: GivenInput
    truncate: bool | None = None
    dimensions: int | None = None


class OldEmbedRequest(PoolingRequest, kw_only=True):
    prompt: str


class ShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None
    """Its older name."""


_NOTHING = ("null",)
UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "context": ("null", "[]"),
    "images": ("null", "[]"),
    "logprobs": ("null", "false"),
    "template": ("null", '""'),
    "top_logprobs": ("null", "0"),
}
