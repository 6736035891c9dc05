"""Chat messages as templates want them."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.openai.schemas import ChatMessage, ChatRequest, ContentPart, ToolCall
from penstock.gateway.apis.openai.tools import custom_arguments
from penstock.gateway.generating.answer_shape import MALFORMED
from penstock.gateway.generating.request_reading import media_note
from penstock.gateway.models.language.images.reader import image_of_url
from penstock.gateway.requests.bounded_json import decode_json
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import ANY_ROLE, ChatTemplateError, check_kwargs

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_RESULTS = ("tool", "function")
"""The latter answered a `function_call`."""
SEEN_ROLES = ("user", "tool")
"""Roles whose images a model is shown."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_VERBOSITIES = ("low", "medium", "high")
_TEXTS = ("text", "input_text", "output_text")
_KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_embeds"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file"), "file"),
}
_DOCUMENT = re.compile(
    r"data:(?:text/[\w.+-]+|application/json)(?:;charset=utf-8)?(;base64)?,", re.ASCII | re.IGNORECASE
)
"""The beginning of a file that is sent as text."""


def template_messages(
    messages: list[ChatMessage],
    context: RequestContext,
    roles: frozenset[str] = frozenset(),
    *,
    reads_images: bool = False,
) -> list[dict[str, Any]]:
    """`roles`: those that the model's chat template reads beside the common ones. What the model cannot be shown is
    replaced by a note, and noted as ignored. Raises InvalidRequestError for other roles, for parts without their text,
    and for images that are not sent with the request where the model `reads_images`."""
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    calls, show = _OpenCalls(), _shown_image if reads_images else _noted
    return [_message(message, number, calls, roles, show, context) for number, message in enumerate(messages)]


def template_kwargs(request: ChatRequest, variables: frozenset[str] | None, context: RequestContext) -> dict[str, Any]:
    """`variables`: what the template reads, where that is known; hints that it does not read are noted as ignored.
    Raises InvalidRequestError for a key that is not the client's to set."""
    kwargs = request.chat_template_kwargs or {}
    try:
        check_kwargs(kwargs)
    except ChatTemplateError as error:
        raise InvalidRequestError(f"{error}.", param="chat_template_kwargs") from None
    if variables is not None and not kwargs.keys() <= variables:
        context.ignore("chat_template_kwargs", "this model's chat template does not read all of them.")
    effort = _effort(request, context)
    verbosity = _verbosity(request, variables, context)
    if effort is None:
        return verbosity | kwargs
    thinking = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **thinking, **verbosity, **kwargs}


def _effort(request: ChatRequest, context: RequestContext) -> str | None:
    effort = request.reasoning_effort
    if effort is None or effort in _EFFORTS:
        return effort
    context.ignore("reasoning_effort", f"it must be one of {', '.join(_EFFORTS)}.")
    return None


def _verbosity(request: ChatRequest, variables: frozenset[str] | None, context: RequestContext) -> dict[str, str]:
    """`medium` is what every model does by itself."""
    verbosity = request.verbosity
    if verbosity in _VERBOSITIES and variables is not None and "verbosity" in variables:
        return {"verbosity": verbosity}
    if verbosity not in (None, "medium"):
        context.ignore("verbosity", "it is not low, medium or high, or this model's chat template does not read it.")
    return {}


def template_documents(request: ChatRequest, variables: frozenset[str] | None) -> list[dict[str, Any]] | None:
    """Raises InvalidRequestError where the template would leave them out."""
    if request.documents and variables is not None and "documents" not in variables:
        raise InvalidRequestError("documents: this model's chat template does not use documents.", param="documents")
    return request.documents or None


def generation_prompt(request: ChatRequest) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message): the assistant's turn is either opened or continued."""
    if request.add_generation_prompt and request.continue_final_message:
        message = "add_generation_prompt and continue_final_message exclude each other."
        raise InvalidRequestError(message, param="continue_final_message")
    if request.continue_final_message:
        return False, True
    return request.add_generation_prompt is not False, False


def echoed_text(request: ChatRequest) -> str:
    """What stands before an answer with `echo`: the last message, if it is of the assistant, too."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join([part.text or "" for part in last.content])


class _OpenCalls:
    """The calls of earlier messages, for results that do not say which they answer. Each is found at once: a body can
    hold very many, and as many results."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._open: dict[str, None] = {}
        """Those without results, the oldest first."""

    def called(self, call_id: str) -> None:
        self._known.add(call_id)
        self._open[call_id] = None

    def answered(self, call_id: str | None, where: str, context: RequestContext) -> str | None:
        """The id of the call: the one that is sent, or the first call without a result. An id that no call has stays:
        the call may be in a part of the history that the client has cut off."""
        if call_id is None or call_id not in self._known:
            context.ignore(where, "it names no call of an earlier assistant message.")
        if call_id is None:
            call_id = next(iter(self._open), None)
        if call_id is not None:
            self._open.pop(call_id, None)
        return call_id


def _message(
    message: ChatMessage,
    number: int,
    calls: _OpenCalls,
    roles: frozenset[str],
    show: ShowImage,
    context: RequestContext,
) -> dict[str, Any]:
    where = f"messages[{number}]"
    role = _role(message.role, where, roles)
    shown = show if role in SEEN_ROLES else _noted
    result: dict[str, Any] = {"role": role, "content": _content(message, where, shown, context)}
    if message.name is not None:
        result["name"] = message.name
    if role == "tool":
        call_id = calls.answered(message.tool_call_id, f"{where}.tool_call_id", context)
        if call_id is not None:
            result["tool_call_id"] = call_id
    elif message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if (reasoning := message.reasoning_content or message.reasoning) is not None and role == "assistant":
        result["reasoning_content"] = reasoning
    if message.tool_calls or message.function_call is not None:
        if role == "assistant":
            result["tool_calls"] = _tool_calls(message, number, calls, context)
        else:
            context.ignore(f"{where}.tool_calls", "only the assistant calls tools.")
    return result


def _role(name: str, where: str, roles: frozenset[str]) -> str:
    role = "tool" if name in _RESULTS else _ROLES.get(name) or (name if reads_role(name, roles) else None)
    if role is None:
        *known, last = [*_ROLES, *sorted(roles - {ANY_ROLE})]
        text = f"{where}.role must be {', '.join(known)} or {last}."
        raise InvalidRequestError(text, param=f"{where}.role")
    return role


def reads_role(role: str, roles: frozenset[str]) -> bool:
    """Whether a chat template with these reads this one, which is no common role in another spelling."""
    if ANY_ROLE in roles and _ROLE.fullmatch(role):
        return role.lower() not in _ROLES
    return role in roles - {ANY_ROLE}


def _content(message: ChatMessage, where: str, show: ShowImage, context: RequestContext) -> str | list[dict[str, Any]]:
    """Nothing is an empty text, unless the message was refused or spoken."""
    content = message.content
    if isinstance(content, str):
        return content
    if content:
        return [_part(part, f"{where}.content[{number}]", show, context) for number, part in enumerate(content)]
    if message.audio is not None:
        transcript = message.audio.get("transcript")
        if isinstance(transcript, str):
            return transcript
        context.ignore(f"{where}.audio", "this model reads text only.")
        return media_note("audio")
    return message.refusal or ""


def _part(part: ContentPart, where: str, show: ShowImage, context: RequestContext) -> dict[str, Any]:
    name = "refusal" if part.type == "refusal" else "text"
    if part.type in _TEXTS or part.type == "refusal":
        text: str | None = getattr(part, name)
        if text is None:
            raise InvalidRequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
        return {"type": "text", "text": text}
    if part.image_url is not None and _KINDS.get(part.type) == "image":
        return show(part, where, context)
    document = None if part.file is None else _document(part.file.get("file_data"))
    return _noted(part, where, context) if document is None else {"type": "text", "text": document}


ShowImage = Callable[[ContentPart, str, RequestContext], dict[str, Any]]
"""A part with an image, and where it stands, as chat templates know it."""


def _noted(part: ContentPart, where: str, context: RequestContext) -> dict[str, Any]:
    context.ignore(f"{where}.type", "this model reads text only; nothing else is fetched or decoded.")
    return {"type": "text", "text": media_note(_KINDS.get(part.type, "content"))}


def _shown_image(part: ContentPart, where: str, context: RequestContext) -> dict[str, Any]:
    fields: dict[str, Any] = part.image_url if isinstance(part.image_url, dict) else {"url": part.image_url}
    image = image_of_url(fields.get("url"), fields.get("detail", part.detail), f"{where}.image_url")
    return {"type": "image", "image": image}


def _document(data: object) -> str | None:
    """The text of a file that is sent as a data URL of a text; None for all other files."""
    beginning = _DOCUMENT.match(data) if isinstance(data, str) else None
    if beginning is None or not isinstance(data, str):
        return None
    rest = data[beginning.end() :]
    try:
        return b64decode(rest, validate=True).decode() if beginning[1] else unquote(rest, errors="strict")
    except ValueError:
        return None


def _tool_calls(message: ChatMessage, number: int, calls: _OpenCalls, context: RequestContext) -> list[dict[str, Any]]:
    """With ids: a call that has none gets one by its place."""
    where = f"messages[{number}]"
    sent = [(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        sent.append((ToolCall(message.function_call), f"{where}.function_call"))
    shown = []
    for n, (call, place) in enumerate(sent):
        call_id = f"call_{number}_{n}" if call.id is None else call.id
        calls.called(call_id)
        shown.append({"id": call_id, "type": "function", "function": _function(call, place, context)})
    return shown


def _function(call: ToolCall, where: str, context: RequestContext) -> dict[str, Any]:
    """A call of a custom tool is that of a function with one argument. Arguments stay the text that the model wrote:
    some templates take it as it is."""
    if call.custom is not None:
        return {"name": call.custom.name, "arguments": custom_arguments(call.custom.input or "")}
    if call.function is None:
        raise InvalidRequestError(f"{where}.function is missing.", param=f"{where}.function")
    arguments = call.function.arguments
    if not isinstance(arguments, str | dict | None):
        arguments = msgspec.json.encode(arguments).decode()
    if not isinstance(arguments, dict):
        arguments = history_arguments(arguments, f"{where}.function.arguments", context)
    return {"name": call.function.name, "arguments": arguments}


def history_arguments(text: str | None, where: str, context: RequestContext) -> str:
    """The arguments of an earlier call as JSON of an object: `{}` for None, `null` and an empty text. A model may have
    written something else, or the end of its answer may have cut them off: then the object has the text as it is."""
    if text is None or text.strip() in ("", "null"):
        return "{}"
    try:
        decode_json(text.encode(), dict[str, Any])
    except InvalidRequestError:
        context.ignore(where, "the arguments are not a JSON object.")
        return msgspec.json.encode({MALFORMED: text}).decode()
    return text
