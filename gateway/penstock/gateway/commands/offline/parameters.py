"""Keyword arguments as the requests of the OpenAI API, so that they mean, and are checked, as they are by a server."""

from __future__ import annotations

import io
import sys
from base64 import b64encode
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
_PICTURES = ("image", "image_pil", "image_url")
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_EMBED = frozenset({"add_special_tokens", "dimensions", "normalize", "prompt_name", "truncate_prompt_tokens"})


def completion_request(model: str, prompt: Any, parameters: Mapping[str, Any]) -> CompletionRequest:
    """Raises TypeError for an unknown name, InvalidRequestError for a value of another type."""
    _check_names("generate", parameters, _GENERATE)
    return _converted({**parameters, "model": model, "prompt": prompt}, CompletionRequest)


def chat_request(model: str, messages: Any, parameters: Mapping[str, Any]) -> ChatRequest:
    """`logprobs` is a number, as for text completions. Raises as `completion_request`."""
    _check_names("chat", parameters, _CHAT)
    fields = {**parameters, "model": model, "messages": _with_urls(messages)}
    if (logprobs := parameters.get("logprobs")) is not None:
        fields |= {"logprobs": True, "top_logprobs": _converted(logprobs, int)}
    return _converted(fields, ChatRequest)


def _with_urls(messages: Any) -> Any:
    """The messages with pictures of Pillow as data URLs, which stand in parts by themselves or as their `image_url`,
    `image` or `image_pil`."""
    pillow = sys.modules.get("PIL.Image")  # else nobody has a picture
    if pillow is None or not isinstance(messages, list | tuple):
        return messages

    def part(value: Any) -> Any:
        pictures = [value[name] for name in _PICTURES if name in value] if isinstance(value, Mapping) else [value]
        if not pictures or not isinstance(pictures[0], pillow.Image):
            return value
        detail = {"detail": value["detail"]} if isinstance(value, Mapping) and "detail" in value else {}
        return {"type": "image_url", "image_url": {"url": _data_url(pictures[0]), **detail}}

    def message(value: Any) -> Any:
        content = value.get("content") if isinstance(value, Mapping) else None
        return {**value, "content": [part(item) for item in content]} if isinstance(content, list | tuple) else value

    return [message(value) for value in messages]


def _data_url(picture: Any) -> str:
    """Upright, as it will be read, and without loss."""
    from PIL import ImageOps

    buffer = io.BytesIO()
    upright = ImageOps.exif_transpose(picture)
    upright = upright if upright.mode in _PNG_MODES else upright.convert("RGB")
    upright.save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"


def embedding_request(model: str, texts: Any, parameters: Mapping[str, Any]) -> EmbeddingRequest:
    """Raises as `completion_request`."""
    _check_names("embed", parameters, _EMBED)
    return _converted({**parameters, "model": model, "input": texts}, EmbeddingRequest)


def prompt_list(prompt: Any) -> list[str | list[int]]:
    """One text, the token ids of one, or several of these. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    several = _converted(prompt, list[int | str | list[int]])
    if several and all(isinstance(item, int) for item in several):
        return [_converted(several, list[int])]
    return _converted(several, list[str | list[int]])


def conversations(messages: Any) -> list[Any]:
    """One list of messages, or several. Raises InvalidRequestError."""
    several = _converted(messages, list[Any])
    return [several] if several and not isinstance(several[0], list | tuple) else several


def _check_names(method: str, parameters: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in parameters:
        if name not in known:
            raise TypeError(f"{method}() has no parameter {name!r}")


def _converted(value: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from None
