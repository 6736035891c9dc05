"""The protocol-neutral verbs. OpenAI and KServe, HTTP and gRPC all call these, and nothing protocol-shaped goes below.

(interface under construction: types and signatures are final, bodies follow)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.messages import ModelInfo, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What to generate. Fronts build it from their own schemas; `DataPlane.generate` validates it against the model."""

    model: str
    prompts: Sequence[str | list[int]]
    """Texts, encoded by the model's tokenizer, or token ids as they are."""
    params: SamplingParams
    """`max_tokens` 0 means: whatever the context leaves."""
    n: int = 1
    """Samples per prompt."""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    """For text prompts: let the tokenizer add BOS and the like. False for rendered chat templates."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    timeout: float | None = None
    """Seconds from now; the smaller of this and the server's own bound holds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token with its logprob, as text."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]
    """The token's UTF-8 bytes, which may be a part of a character."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(Candidate):
    top: list[Candidate]
    """The likeliest tokens at this position, best first; as many as were asked for."""


@dataclass(slots=True)
class ChoiceDelta:
    """What one choice has got since the last delta."""

    index: int
    """prompt number * n + sample number."""
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop" or "length", in the choice's last delta."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for EOS."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of token_ids, when asked for."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Generation:
    """The choices of one call: an async iterator of lists of ChoiceDelta (at most one per choice in each list).

    Iterating raises the PenstockError that ended a choice, if one did. `close()` (idempotent; also at the end of
    `async with`) aborts whatever still runs.
    """

    prompt_token_ids: list[list[int]]
    prompt_logprobs: list[list[TokenLogprob | None]] | None
    """For each prompt, when asked for: None for its first token, then one for each other. Known with the first delta of that prompt."""
    usage: Usage
    """Counts up while the generation is consumed. prompt_tokens counts each prompt once, whatever n is."""
    usage_by_choice: list[int]
    """Completion tokens of each choice."""

    def __aiter__(self) -> Generation: ...
    async def __anext__(self) -> list[ChoiceDelta]: ...
    def close(self) -> None: ...
    async def __aenter__(self) -> Generation: ...
    async def __aexit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under one public name."""

    name: str
    root: str
    """The folder or hub id it came from, without local paths: shown in /v1/models."""
    created: int
    """Unix seconds."""
    info: ModelInfo
    default_params: dict[str, Any] = field(default_factory=dict)
    """From the model's generation_config.json: temperature, top_p, top_k, repetition_penalty, where set. Fronts use these where the caller is silent."""
    has_chat_template: bool = True


class DataPlane:
    def models(self) -> list[ServedModel]:
        """All served names, the base model first."""
        ...

    def model(self, name: str) -> ServedModel:
        """Raises ModelNotFoundError. While the engine loads, models() is empty and model() raises NotReadyError."""
        ...

    @property
    def live(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    async def chat_prompt(
        self,
        model: str,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Renders the chat template and encodes it. Raises InvalidRequestError for messages that the template refuses."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns when the first output is there, so that whatever can be refused has been refused before a response starts.

        Raises InvalidRequestError and its kin for values that do not fit the model, OverloadedError, DeadlineExceededError, EngineError.
        """
        ...
