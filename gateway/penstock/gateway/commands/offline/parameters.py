"""Keyword arguments as the requests of the OpenAI API, so that they mean, and are checked, as they are by a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.apis.pooling.schemas import EmbeddingRequest
from penstock.gateway.models.language.sampling import SamplingFields

_T = TypeVar("_T")
_BOTH = {
    *SamplingFields.__struct_fields__,
    *("add_special_tokens", "logprobs", "priority", "prompt_logprobs", "spaces_between_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side", "user"),
}
_GENERATE = frozenset(_BOTH | {"suffix"})
_CHAT = frozenset(
    (_BOTH - {"add_special_tokens"})
    | {"add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "include_reasoning"}
    | {"max_completion_tokens", "max_reasoning_tokens", "parallel_tool_calls", "prediction", "reasoning_effort"}
    | {"thinking_token_budget", "tool_choice", "tools", "verbosity"}
)
_EMBED = frozenset({"add_special_tokens", "dimensions", "normalize", "prompt_name", "truncate_prompt_tokens"})


def completion_request(model: str, prompt: Any, given: Mapping[str, Any]) -> CompletionRequest:
    """Raises TypeError for an unknown name, InvalidRequestError for a value of another type."""
    _check_names("generate", given, _GENERATE)
    return _converted({**given, "model": model, "prompt": prompt}, CompletionRequest)


def chat_request(model: str, messages: Any, given: Mapping[str, Any]) -> ChatRequest:
    """`logprobs` is a number, as for text completions. Raises as `completion_request`."""
    _check_names("chat", given, _CHAT)
    fields = {**given, "model": model, "messages": messages}
    if (logprobs := given.get("logprobs")) is not None:
        fields |= {"logprobs": True, "top_logprobs": _converted(logprobs, int)}
    return _converted(fields, ChatRequest)


def embedding_request(model: str, texts: Any, given: Mapping[str, Any]) -> EmbeddingRequest:
    """Raises as `completion_request`."""
    _check_names("embed", given, _EMBED)
    return _converted({**given, "model": model, "input": texts}, EmbeddingRequest)


def prompt_list(given: Any) -> list[str | list[int]]:
    """One text, the token ids of one, or several of these. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    several = _converted(given, list[int | str | list[int]])
    if several and all(isinstance(item, int) for item in several):
        return [_converted(several, list[int])]
    return _converted(several, list[str | list[int]])


def conversations(given: Any) -> list[Any]:
    """One list of messages, or several. Raises InvalidRequestError."""
    several = _converted(given, list[Any])
    return [several] if several and not isinstance(several[0], list | tuple) else several


def _check_names(method: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{method}() has no parameter {name!r}")


def _converted(given: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from None
