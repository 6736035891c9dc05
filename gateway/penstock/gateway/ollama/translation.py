"""A request of Ollama's as one of the chat or text completions front, which checks it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.generating.answer_stages import check_reasoning_parser
from penstock.gateway.llm.dataplane import ServedModel
from penstock.gateway.llm.structured_output import JsonSchema, ResponseFormat
from penstock.gateway.ollama.schemas import ChatRequest, Format, GenerateRequest, Message, Options, Think
from penstock.gateway.openai import schemas as openai

_ROLES = ("system", "user", "assistant", "tool")
_WHAT_FITS = (None, -1, -2)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "mirostat": (None, 0),
    "repeat_last_n": (None, -1),
    "tfs_z": (None, 1),
    "typical_p": (None, 1),
}
"""Options that this server does not have, each with the values that ask for nothing. Penalties count all tokens."""


def openai_chat(
    request: ChatRequest | GenerateRequest,
    name: str,
    tools: list[dict[str, Any]] | None,
    model: ServedModel | None = None,
) -> openai.ChatRequest:
    """Still without messages. `model`: None where another server has it. Raises InvalidRequestError,
    UnsupportedError."""
    if model is not None and request.think not in (None, False):
        check_reasoning_parser(model.parsers, "think")
    return openai.ChatRequest(
        model=name,
        messages=[],
        tools=tools or None,
        tool_choice="auto" if tools else None,
        include_reasoning=request.think is not False,
        chat_template_kwargs=_thinking(request.think, None if model is None else model.template_variables),
        response_format=_response_format(request.format),
        **_sampling(request.options or Options()),
    )


def openai_completion(request: GenerateRequest, name: str) -> openai.CompletionRequest:
    """Raises InvalidRequestError, UnsupportedError."""
    if request.think:
        raise InvalidRequestError("think: a raw prompt has no thoughts apart from the answer.", param="think")
    fields = _sampling(request.options or Options())
    return openai.CompletionRequest(
        model=name,
        prompt=request.prompt,
        suffix=request.suffix,
        response_format=_response_format(request.format),
        **fields | {"max_tokens": fields["max_tokens"] or -1},
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates know them. Calls have no ids, and results of tools name the tool: ids are made here. Raises
    InvalidRequestError, UnsupportedError."""
    found: list[dict[str, Any]] = []
    calls = _OpenCalls()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role not in _ROLES:
            raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
        if message.images:
            raise UnsupportedError(f"{where}.images: this server takes no images.", param=f"{where}.images")
        shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "assistant":
            if message.thinking:
                shown["reasoning_content"] = message.thinking
            if message.tool_calls:
                shown["tool_calls"] = [_call(each.function, number, n) for n, each in enumerate(message.tool_calls)]
                for each in shown["tool_calls"]:
                    calls.add(each["id"], each["function"]["name"])
        elif message.role == "tool":
            shown |= calls.answered(message.tool_name, where)
        found.append(shown)
    return found


def _call(function: Any, message: int, number: int) -> dict[str, Any]:
    shown = {"name": function.name, "arguments": function.arguments}
    return {"id": f"call_{message}_{number}", "type": "function", "function": shown}


class _OpenCalls:
    """Calls without results. Each is found at once: a body can hold hundreds of thousands, and as many results."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()
        """By id, the oldest first."""
        self._by_name: dict[str, deque[str]] = {}
        """Ids, the oldest first; also of calls that have their results by now."""

    def add(self, call_id: str, name: str) -> None:
        self._names[call_id] = name
        self._by_name.setdefault(name, deque()).append(call_id)

    def answered(self, name: str | None, where: str) -> dict[str, Any]:
        """The call that a result belongs to: the first one of that name without a result, or the first one of all.
        Raises InvalidRequestError."""
        call_id = next(iter(self._names), None) if name is None else self._first_of(name)
        if call_id is None:
            raise InvalidRequestError(f"{where} answers no tool call before it.", param=where)
        return {"name": self._names.pop(call_id), "tool_call_id": call_id}

    def _first_of(self, name: str) -> str | None:
        ids = self._by_name.get(name, deque())
        while ids and ids[0] not in self._names:
            ids.popleft()
        return ids[0] if ids else None


def _thinking(think: Think | None, variables: frozenset[str] | None) -> dict[str, Any] | None:
    """What the template is told, as far as it asks."""
    if think is None:
        return None
    kwargs: dict[str, Any] = {"enable_thinking": think is not False}
    if isinstance(think, str):
        kwargs["reasoning_effort"] = think
    return {name: value for name, value in kwargs.items() if variables is None or name in variables}


def _response_format(given: Format | None) -> ResponseFormat | None:
    if not given:
        return None
    if given == "json":
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="format", schema=given))


def _sampling(options: Options) -> dict[str, Any]:
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in neutral:
            raise UnsupportedError(f"options.{name} is not supported with that value.", param=f"options.{name}")
    return {
        "max_tokens": None if options.num_predict in _WHAT_FITS else options.num_predict,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
