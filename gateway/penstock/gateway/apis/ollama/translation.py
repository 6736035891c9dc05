"""A request of Ollama's as one of the chat or text completions front, which checks it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.ollama.schemas import (
    CalledFunction,
    Format,
    GeneratingRequest,
    Number,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
    Think,
)
from penstock.gateway.apis.openai import schemas as openai
from penstock.gateway.apis.openai.messages import SEEN_ROLES, history_arguments, reads_role
from penstock.gateway.apis.openai.validation import MAX_LOGPROBS
from penstock.gateway.generating.request_reading import media_note
from penstock.gateway.models.language.dataplane import GenerateRequest as TextRequest
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.models.language.images.reader import RequestImage, image_of_url
from penstock.gateway.models.language.sampling import bounded
from penstock.gateway.models.language.structured_output import JsonSchema, ResponseFormat
from penstock.gateway.requests.context import RequestContext

_OTHER_SAMPLER = "this server's sampler does not have it."
_OPERATOR = "how the machine is used is the operator's to say."
_HINTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "mirostat": ((0,), _OTHER_SAMPLER),
    "penalize_newline": ((True,), _OTHER_SAMPLER),
    "tfs_z": ((1,), _OTHER_SAMPLER),
    "typical_p": ((1,), _OTHER_SAMPLER),
    **dict.fromkeys(
        (
            *("num_batch", "num_gpu", "num_thread", "main_gpu", "numa", "low_vram", "f16_kv"),
            *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only"),
        ),
        ((), _OPERATOR),
    ),
}
"""What is noted as ignored: the values that ask for nothing, and why."""
_INT32_MAX = 2**31 - 1
_OWN_BOUNDS = {"temperature": (0.0, 1000.0), "presence_penalty": (-100.0, 100.0), "frequency_penalty": (-100.0, 100.0)}
"""What the sampler computes without loss. OpenAI's bounds are narrower, and Ollama has none."""
_OPENAI_BOUNDS = {"temperature": (0.0, 2.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}


def whole(number: Number | None) -> int | None:
    """Without what is behind the point, as Ollama reads it."""
    return None if number is None else int(number)


def sampling_fields(options: Options, context: RequestContext) -> dict[str, Any]:
    """By OpenAI's names, values out of range at the end of the range, as in Ollama. What is not followed is noted."""
    _note_hints(options, context)
    most = whole(options.num_predict)
    fields = {
        "max_tokens": None if most is None or most < 0 else max(most, 1),
        "temperature": None if options.temperature is None else max(options.temperature, 0.0),
        "top_k": None if options.top_k is None else min(max(int(options.top_k), 0), _INT32_MAX),
        "top_p": _share(options.top_p),
        "min_p": _share(options.min_p),
        "seed": whole(options.seed),
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    if options.repeat_last_n == 0:  # no token is looked at: also those penalties are off that the model's files set
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return fields


def within_openai(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same with values that OpenAI's API allows; `widened` brings back the others."""
    return {**fields, **{name: _clamped(fields[name], *bounds) for name, bounds in _OPENAI_BOUNDS.items()}}


def widened(text_request: TextRequest, fields: Mapping[str, Any], context: RequestContext) -> TextRequest:
    """With those of `fields` that are outside OpenAI's bounds. What is outside the sampler's own is cut and noted."""
    changed = {}
    for name, (low, high) in _OPENAI_BOUNDS.items():
        value = fields[name]
        if value is None or low <= value <= high:
            continue
        changed[name] = _clamped(value, *_OWN_BOUNDS[name])
        if changed[name] != value:
            context.ignore(f"options.{name}", "it is further from 0 than the sampler computes.")
    return (
        replace(text_request, params=msgspec.structs.replace(text_request.params, **changed))
        if changed
        else text_request
    )


def _note_hints(options: Options, context: RequestContext) -> None:
    for name, (neutral, reason) in _HINTS.items():
        value = getattr(options, name)
        if value is not None and value not in neutral:
            context.ignore(f"options.{name}", reason)
    penalties = (options.repeat_penalty, options.presence_penalty, options.frequency_penalty)
    if options.repeat_last_n not in (None, -1, 0) and any(value is not None for value in penalties):
        context.ignore("options.repeat_last_n", "penalties count all tokens.")


def _share(value: float | None) -> float | None:
    return _clamped(value, 0.0, 1.0)


def _clamped(value: float | None, low: float, high: float) -> float | None:
    return None if value is None else min(max(value, low), high)


_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "function": "tool",
}


def openai_chat(
    request: OllamaChatRequest | OllamaGenerateRequest,
    name: str,
    tools: list[dict[str, Any]] | None,
    sampling: Mapping[str, Any],
    context: RequestContext,
    model: ServedModel | None = None,
) -> openai.ChatRequest:
    """Still without messages. `model`: None where another server has it. Raises InvalidRequestError,
    UnsupportedError."""
    think = False if request.think == "none" else request.think
    if model is not None and think not in (None, False) and model.parsers.reasoning is None:
        context.ignore("think", "this model's chat template shows no reasoning (--reasoning-parser).")
        think = None
    tools = _functions(tools or (), context)
    return openai.ChatRequest(
        model=name,
        messages=[],
        tools=tools or None,
        tool_choice="auto" if tools else None,
        include_reasoning=think is not False,
        chat_template_kwargs=_thinking(think, None if model is None else model.template_variables, context),
        response_format=_response_format(request.format),
        logprobs=request.logprobs,
        top_logprobs=_top_logprobs(request),
        **sampling,
    )


def openai_completion(
    request: OllamaGenerateRequest,
    name: str,
    prompt: str | list[int],
    sampling: Mapping[str, Any],
    context: RequestContext,
) -> openai.CompletionRequest:
    """Raises InvalidRequestError, UnsupportedError."""
    if request.think:
        context.ignore("think", "a prompt without a chat template has no thoughts apart from the answer.")
    top = _top_logprobs(request)
    return openai.CompletionRequest(
        model=name,
        prompt=list(prompt) if isinstance(prompt, list) else prompt,
        suffix=request.suffix,
        response_format=_response_format(request.format),
        logprobs=(top or 0) if request.logprobs else None,
        **{**sampling, "max_tokens": sampling["max_tokens"] or -1},
    )


def _top_logprobs(request: GeneratingRequest) -> int | None:
    """Raises InvalidRequestError."""
    top = request.top_logprobs
    if top is not None:
        bounded(top, "top_logprobs", 0, MAX_LOGPROBS)
    return top if request.logprobs else None


def _functions(tools: Sequence[dict[str, Any]], context: RequestContext) -> list[dict[str, Any]]:
    """Those that a model can call. Ollama takes whatever has the name `tools`."""
    functions = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") in (None, "", "function") and isinstance(function, dict) and function.get("name"):
            functions.append({**tool, "type": "function", "function": _with_parameters(function)})
        else:
            context.ignore(f"tools[{number}]", "it is no function with a name.")
    return functions


def _with_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whether the schema says so or has nothing there."""
    parameters = function.get("parameters")
    if isinstance(parameters, dict) and not parameters.get("type"):
        return {**function, "parameters": {**parameters, "type": "object"}}
    return dict(function)


def template_messages(
    messages: Sequence[OllamaMessage],
    context: RequestContext,
    roles: frozenset[str] = frozenset(),
    *,
    reads_images: bool = False,
) -> list[dict[str, Any]]:
    """As chat templates know them. Calls need no ids, and results of tools name the tool: ids are made here. What
    cannot be shown as it is, is shown in another way and noted. Raises InvalidRequestError for images that are no
    texts, where the model `reads_images`."""
    shaped: list[dict[str, Any]] = []
    calls = _OpenCalls()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = _role(message.role, where, context, roles)
        sees = reads_images and role in SEEN_ROLES
        content = with_images(message.content or "", message.images, f"{where}.images", context, reads_images=sees)
        shown: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            if message.thinking:
                shown["reasoning_content"] = message.thinking
            if message.tool_calls:
                shown["tool_calls"] = [
                    _call(call.function, call.id or f"call_{number}_{n}", f"{where}.tool_calls[{n}]", context)
                    for n, call in enumerate(message.tool_calls)
                ]
                for call in shown["tool_calls"]:
                    calls.add(call["id"], call["function"]["name"])
        elif role == "tool":
            shown |= calls.answered(message, number, context)
        shaped.append(shown)
    return shaped


def _role(role: str, where: str, context: RequestContext, roles: frozenset[str]) -> str:
    """A role that nobody knows is the user's, who has the least to say."""
    known = _ROLES.get(role)
    if known is not None:
        return known
    if reads_role(role, roles):
        return role
    context.ignore(f"{where}.role", "this model's chat template does not know it: the message is the user's.")
    return "user"


def with_images(
    text: str, images: Sequence[Any] | None, where: str, context: RequestContext, *, reads_images: bool
) -> str | list[dict[str, Any]]:
    """The text and its images, or a line that says that there was more. Raises InvalidRequestError."""
    if not images:
        return text
    if reads_images:
        return _placed([_image(image, f"{where}[{number}]") for number, image in enumerate(images)], text)
    return with_note(text, where, context)


def with_note(text: str, where: str, context: RequestContext) -> str:
    context.ignore(where, "it is not shown to the model, which reads text only here.")
    note = media_note("image")
    return f"{text}\n{note}" if text else note


_PLACE = "[img]"
"""In a message: where its next image stands. Those that have no place stand before the text."""


def _placed(images: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    texts = text.split(_PLACE, len(images))
    parts = list(images[len(texts) - 1 :])
    for number, piece in enumerate(texts):
        parts += images[number - 1 : number] if number else ()
        parts += [{"type": "text", "text": piece}] if piece else ()
    return parts


def _image(data: Any, where: str) -> dict[str, Any]:
    """Of a text in base64. Some clients send data URLs."""
    if not isinstance(data, str):
        raise InvalidRequestError(f"{where} must be an image in base64.", param=where)
    image = image_of_url(data, None, where) if data.startswith("data:") else RequestImage(data, where)
    return {"type": "image", "image": image}


def _call(function: CalledFunction, call_id: str, where: str, context: RequestContext) -> dict[str, Any]:
    arguments = function.arguments
    if not isinstance(arguments, dict):
        arguments = history_arguments(arguments, f"{where}.function.arguments", context)
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


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

    def answered(self, message: OllamaMessage, number: int, context: RequestContext) -> dict[str, Any]:
        """The call that a result belongs to: the one with its id, else the first one of its name without a result, or
        the first one of all. A result without a call stays one, of a call with an id of its own."""
        call_id = self._of(message.tool_call_id, message.tool_name)
        if call_id is None:
            context.ignore(f"messages[{number}].tool_name", "the result answers no tool call before it.")
            return {"name": message.tool_name or "tool", "tool_call_id": f"call_{number}_0"}
        return {"name": self._names.pop(call_id), "tool_call_id": call_id}

    def _of(self, call_id: str | None, name: str | None) -> str | None:
        if call_id in self._names:
            return call_id
        return self._first_of(name) if name else next(iter(self._names), None)

    def _first_of(self, name: str) -> str | None:
        ids = self._by_name.get(name, deque())
        while ids and ids[0] not in self._names:
            ids.popleft()
        return ids[0] if ids else None


def _thinking(think: Think | None, variables: frozenset[str] | None, context: RequestContext) -> dict[str, Any] | None:
    """What the template is told, as far as it asks."""
    if think is None:
        return None
    kwargs: dict[str, Any] = {"enable_thinking": think is not False}
    if isinstance(think, str):
        kwargs["reasoning_effort"] = think
        if variables is not None and "reasoning_effort" not in variables:
            context.ignore("think", "this model's chat template knows no levels of thinking.")
    return {name: value for name, value in kwargs.items() if variables is None or name in variables}


def _response_format(schema: Format | None) -> ResponseFormat | None:
    if not schema:
        return None
    if schema == "json":
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="format", schema=schema))
