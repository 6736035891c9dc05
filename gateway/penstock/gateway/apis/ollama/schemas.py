"""Requests of Ollama's API as this server reads them. What Ollama does not know is ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.gateway.apis.pooling.schemas import GivenInput, PoolingRequest

Think = bool | Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Format = Literal["", "json"] | dict[str, Any]
"""A dict: the JSON schema of the answer."""
Number = int | float
"""Languages without integers send whole numbers as 40.0. Large integers stay exact."""


class Options(msgspec.Struct, kw_only=True):
    """What Ollama knows. Others are ignored."""

    temperature: float | None = None
    top_k: Number | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Number | None = None
    stop: str | list[str] | None = None
    num_predict: Number | None = None
    """Negative: what the context leaves. 0: the prompt is computed, and no answer."""
    num_ctx: Number | None = None
    num_keep: Number | None = None
    """First tokens of a prompt that stay when it is cut."""
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Number | None = None
    tfs_z: Any = None
    typical_p: Any = None
    mirostat: Any = None
    penalize_newline: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_thread: Any = None
    main_gpu: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    vocab_only: Any = None
    logits_all: Any = None
    embedding_only: Any = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class GeneratingRequest(msgspec.Struct, kw_only=True):
    """What chats and prompts share."""

    model: str
    stream: bool | None = True
    options: Options | None = None
    format: Format | None = None
    think: Think | None = None
    keep_alive: float | str | None = None
    """`keep_alive.keep`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    """False: a prompt that is longer than the context is refused, and not cut."""


class OllamaChatRequest(GeneratingRequest, kw_only=True):
    messages: list[OllamaMessage] | None = None
    """Empty: the model is to be loaded, which it is."""
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(GeneratingRequest, kw_only=True):
    prompt: str | None = None
    """Empty: the model is to be loaded, which it is."""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    """The prompt is what the model reads, without its chat template."""
    template: str | None = None
    context: list[int] | None = None
    """Tokens of an earlier answer's `context`, which go before this prompt."""
    images: list[Any] | None = None


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


class PullRequest(ShowRequest, kw_only=True):
    stream: bool | None = True


_TAG = ":latest"


def model_name(name: str, is_known: Callable[[str], bool]) -> str:
    """Clients put a tag behind names that have none."""
    return name.removesuffix(_TAG) if name.endswith(_TAG) and not is_known(name) else name
