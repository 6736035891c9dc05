"""Chat messages as templates want them."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.front.context import RequestContext
from penstock.gateway.openai.schemas import ChatMessage, ChatRequest, ContentPart, ToolCall
from penstock.tokenizers import ChatTemplateError, check_kwargs

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MALFORMED = "malformed_arguments"
"""What the model is shown of a call whose arguments are no JSON object, as their only argument. Chat templates need an
object."""
_KNOWN_PARTS = frozenset(
    {
        *("image", "image_url", "input_image", "image_embeds", "audio", "audio_url", "input_audio"),
        *("video", "video_url", "input_video", "file", "input_file", "refusal"),
    }
)


def template_messages(messages: list[ChatMessage], context: RequestContext) -> list[dict[str, Any]]:
    """Raises InvalidRequestError for an unknown role or a message without content, UnsupportedError for parts other
    than text."""
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    converted = [_message(message, f"messages[{number}]", context) for number, message in enumerate(messages)]
    _check_tool_answers(messages)
    return converted


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
    effort = request.reasoning_effort
    verbosity = _verbosity(request, variables, context)
    if effort is None:
        return verbosity | kwargs
    thinking = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **thinking, **verbosity, **kwargs}


def _verbosity(request: ChatRequest, variables: frozenset[str] | None, context: RequestContext) -> dict[str, str]:
    """`medium` is what every model does by itself."""
    verbosity = request.verbosity
    if verbosity is not None and variables is not None and "verbosity" in variables:
        return {"verbosity": verbosity}
    if verbosity not in (None, "medium"):
        context.ignore("verbosity", "this model's chat template does not read it.")
    return {}


def template_documents(request: ChatRequest, variables: frozenset[str] | None) -> list[dict[str, Any]] | None:
    """Raises InvalidRequestError where the template would leave them out."""
    if request.documents and variables is not None and "documents" not in variables:
        raise InvalidRequestError("documents: this model's chat template does not use documents.", param="documents")
    return request.documents or None


def _check_tool_answers(messages: list[ChatMessage]) -> None:
    """Each tool message answers a call that the assistant has made before. Raises InvalidRequestError."""
    called: set[str | None] = set()
    for number, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls or ()}
        if message.role != "tool":
            continue
        param = f"messages[{number}].tool_call_id"
        if message.tool_call_id is None:
            raise InvalidRequestError(f"{param} is missing.", param=param)
        if message.tool_call_id not in called and None not in called:
            raise InvalidRequestError(f"{param} names no call of an earlier assistant message.", param=param)


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


def _message(message: ChatMessage, where: str, context: RequestContext) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        text = f"{where}.role must be system, developer, user, assistant or tool."
        raise InvalidRequestError(text, param=f"{where}.role")
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise UnsupportedError(f"{where}.{name} is not supported.", param=f"{where}.{name}")
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise InvalidRequestError(f"{where}.content is missing.", param=f"{where}.content")
    result: dict[str, Any] = {"role": role, "content": _content(message.content, where)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if (reasoning := message.reasoning_content or message.reasoning) is not None and role == "assistant":
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        if role != "assistant":
            text = f"{where}.tool_calls: only the assistant calls tools."
            raise InvalidRequestError(text, param=f"{where}.tool_calls")
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{number}].function.arguments", context)
            for number, call in enumerate(message.tool_calls)
        ]
    return result


def _content(content: str | list[ContentPart] | None, where: str) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]


def _part(part: ContentPart, where: str) -> dict[str, str]:
    if part.type == "text":
        if part.text is None:
            raise InvalidRequestError(f"{where}.text is missing.", param=f"{where}.text")
        return {"type": "text", "text": part.text}
    if part.type in _KNOWN_PARTS:
        message = (
            f"{where}: content parts of type '{part.type}' are not supported. Models on this server read text only; "
            "nothing else is fetched or decoded."
        )
        raise UnsupportedError(message, param=f"{where}.type")
    raise InvalidRequestError("Unknown type of content part.", param=f"{where}.type")


def _tool_call(call: ToolCall, where: str, context: RequestContext) -> dict[str, Any]:
    """`where`: of its arguments, which stay the text that the model wrote: some templates take it as it is."""
    arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = history_arguments(arguments, where, context)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def history_arguments(text: str | None, where: str, context: RequestContext) -> str:
    """The arguments of an earlier call as JSON of an object: `{}` for None, `null` and an empty text. A model may have
    written something else, or the end of its answer may have cut them off: then the object has the text as it is."""
    if text is None or text.strip() in ("", "null"):
        return "{}"
    try:
        decode_json(text.encode(), dict[str, Any])
    except InvalidRequestError:
        context.ignore(where, "the arguments are not a JSON object.")
        return msgspec.json.encode({_MALFORMED: text}).decode()
    return text
