"""Input items: what a client sends, as this server keeps it, shows it to models, and shows it again."""

from __future__ import annotations

import re
import uuid
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.responses.schemas import GivenItem, InputItem, ResponseContentPart
from penstock.gateway.generating.request_reading import media_note
from penstock.gateway.models.language.images.reader import RequestImage, image_of_url
from penstock.gateway.requests.context import RequestContext

# `encrypted_content` of reasoning items: the text as an opaque string, for clients that keep the conversation
# themselves and send this back without `content`.
#
# It is encoded and not encrypted. The client is shown the same text anyway, and may change it: it could as well send
# another `content`. The text is shorter than the string, so a body's bound is its bound, too.

_PREFIX = "penstock1."
"""Tells these strings from those of other servers, and from later forms."""


def encode_reasoning(text: str) -> str:
    return _PREFIX + b64encode(text.encode()).decode()


def decode_reasoning(encoded: str) -> str:
    """Raises ValueError for what `encode_reasoning` does not make."""
    if not encoded.startswith(_PREFIX):
        raise ValueError("not from this server")
    return b64decode(encoded.removeprefix(_PREFIX), validate=True).decode()


RESPONSE_PREFIX = "resp_"
_ROLES = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
"""Each with the type of its text."""
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_NOTES = {
    "input_image": "image",
    "computer_screenshot": "screenshot",
    "input_file": "file",
    "input_audio": "recording",
}
"""Parts that models here cannot read."""
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_INPUTS = ("arguments", "action", "operation", "code", "queries", "input")
_RESULTS = ("output", "outputs", "result", "results", "error")
"""Where calls of tools that other servers have run say what they were called with, and what came of it."""
_MOST_FOREIGN_CHARS = 1 << 16
_MOST_ID_CHARS = 64
_RESPONSE_CHARS = 32
_MOST_NAME_CHARS = 200
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9_.-]")
_encode = msgspec.json.Encoder().encode


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def fresh_item_id(kind: str) -> str:
    """For an item of this type."""
    return new_id(_PREFIXES[kind])


def response_of(item_id: str) -> str:
    """The id of the response that the item with this id would be of, if it is one of a response's output."""
    return RESPONSE_PREFIX + item_id.partition("_")[2][:_RESPONSE_CHARS]


def id_in_message(text: str) -> str:
    """A client's id as errors may show it: cleaned and cut."""
    return _NOT_IN_ID.sub("", text[: 4 * _MOST_ID_CHARS])[:_MOST_ID_CHARS]


def input_items(
    inputs: str | list[GivenItem], context: RequestContext, field: str = "input", *, reads_images: bool = False
) -> list[InputItem]:
    """What models cannot be shown as it is becomes a short text, or is left out; `context` notes it. `field` is the
    request's; `reads_images`: the model does. Raises InvalidRequestError for items that say nothing."""
    if isinstance(inputs, str):
        return [InputItem(role="user", content=inputs)]
    if not inputs:
        raise InvalidRequestError(f"{field} must not be empty.", param=field)
    items: list[InputItem] = []
    for number, item in enumerate(inputs):
        items += _items(item, f"{field}[{number}]", context, reads_images)
    if not items:
        raise InvalidRequestError(f"{field} has no item that a model can be shown.", param=field)
    return items


def content_text(content: str | Sequence[ResponseContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([_note("input_image") if part.is_image else part.text or "" for part in content])


def shown_item(item: InputItem) -> dict[str, Any]:
    """As a list of input items shows it."""
    head = {"id": item.id or fresh_item_id(item.type), "type": item.type, "status": "completed"}
    namespace = {} if item.namespace is None else {"namespace": item.namespace}
    match item.type:
        case "function_call":
            return {**head, "call_id": item.call_id, "name": item.name, **namespace, "arguments": item.arguments}
        case "custom_tool_call":
            return {**head, "call_id": item.call_id, "name": item.name, **namespace, "input": item.input}
        case "function_call_output" | "custom_tool_call_output":
            output = item.output if isinstance(item.output, str) else _shown_parts(item.output, "input_text")
            return {**head, "call_id": item.call_id, "output": output}
        case "reasoning":
            return {**head, "summary": [], "content": _shown_parts(item.content, "reasoning_text")}
        case _:
            return {**head, "role": item.role, "content": _shown_parts(item.content, _ROLES[item.role or ""])}


def _shown_parts(content: str | list[ResponseContentPart] | None, kind: str) -> list[dict[str, Any]]:
    parts = [ResponseContentPart(kind, content)] if isinstance(content, str) else content or []
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [_shown_image(part) if part.is_image else {"type": kind, "text": part.text, **more} for part in parts]


def _shown_image(part: ResponseContentPart) -> dict[str, Any]:
    source = {"image_url": part.image_url} if part.image_url else {"file_id": part.file_id}
    return {"type": "input_image", **source, "detail": part.detail or "auto"}


def image_of_part(part: ResponseContentPart, where: str) -> RequestImage:
    """Raises InvalidRequestError for a URL that has no image, and where there is neither that nor a file."""
    if part.file_id and not part.image_url:
        return RequestImage("", f"{where}.file_id", coarse=part.detail == "low", file_id=part.file_id)
    return image_of_url(part.image_url, part.detail, f"{where}.image_url")


def _items(item: GivenItem, where: str, context: RequestContext, sees: bool) -> Sequence[InputItem]:
    kind = item.type
    if kind is None:
        is_reference = item.id is not None and item.role is None and item.content is None
        kind = "item_reference" if is_reference else "message"
    match kind:
        case "message":
            return (_message(item, where, context, sees),)
        case "function_call" | "custom_tool_call":
            return (_call(item, kind, where),)
        case "function_call_output" | "custom_tool_call_output":
            return (_output(item, kind, item.output, f"{where}.output", context, sees),)
        case "reasoning":
            return (_thought(item, where, context),)
        case "item_reference":
            if not item.id:
                raise InvalidRequestError(f"{where}.id is missing.", param=f"{where}.id")
            return (InputItem(type=kind, id=item.id),)
    context.ignore(f"{where}.type", "items of this type are shown to models as calls of functions, or left out.")
    if kind.endswith("_call"):
        return _foreign_call(item, kind)
    if kind.endswith("_call_output"):
        return (_foreign_output(item, item.call_id),)
    return ()


def _message(item: GivenItem, where: str, context: RequestContext, sees: bool) -> InputItem:
    role = item.role
    if role is None:
        message = f"{where}.role must be user, assistant, system or developer."
        raise InvalidRequestError(message, param=f"{where}.role")
    if role == "tool":
        context.ignore(f"{where}.role", "the message is taken for the output of a tool.")
        return _output(item, "function_call_output", item.content, f"{where}.content", context, sees)
    if role not in _ROLES:
        context.ignore(f"{where}.role", "no such role: the message is shown as the user's.")
        role = "user"
    content = _content(item.content, f"{where}.content", context, sees and role == "user")
    return InputItem(id=item.id, role=role, content=content)


def _call(item: GivenItem, kind: str, where: str) -> InputItem:
    if item.name is None:
        raise InvalidRequestError(f"{where}.name is missing.", param=f"{where}.name")
    call = InputItem(
        type=kind,
        id=item.id,
        call_id=item.call_id or new_id("call"),
        name=item.name,
        namespace=item.namespace or None,
    )
    if kind == "custom_tool_call":
        call.input = _text(item.input)
    else:
        call.arguments = _text(item.arguments)
    return call


def _output(item: GivenItem, kind: str, content: Any, where: str, context: RequestContext, sees: bool) -> InputItem:
    are_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    output = _content(content, where, context, sees) if are_parts else _text(content)
    call_id = item.call_id or new_id("call")
    return InputItem(
        type=kind, id=item.id, call_id=call_id, name=item.name, namespace=item.namespace or None, output=output
    )


def _thought(item: GivenItem, where: str, context: RequestContext) -> InputItem:
    """Its content, else what is encoded, else its summary."""
    content = _content(item.content, f"{where}.content", context)
    if not content and item.encrypted_content:
        try:
            content = [ResponseContentPart("reasoning_text", decode_reasoning(item.encrypted_content))]
        except ValueError:
            context.ignore(f"{where}.encrypted_content", "it is not from this server, or is damaged.")
    if not content:
        content = _content(item.summary, f"{where}.summary", context)
    return InputItem(type="reasoning", id=item.id, content=content)


def _foreign_call(item: GivenItem, kind: str) -> Sequence[InputItem]:
    """The call of a tool that another server or its client has run, as one of a function. Without an id of its own, its
    output is part of it."""
    inputs = {name: value for name in _INPUTS if (value := getattr(item, name)) is not None}
    only = inputs.get("arguments")
    arguments = only if isinstance(only, str) else _encode(inputs).decode()
    name = item.name or kind.removesuffix("_call")
    call_id = item.call_id or new_id("call")
    call = InputItem(type="function_call", call_id=call_id, name=name, arguments=arguments)
    has_result = any(getattr(item, name) is not None for name in _RESULTS)
    if item.call_id is not None and not has_result:
        return (call,)
    return call, _foreign_output(item, call_id)


def _foreign_output(item: GivenItem, call_id: str | None) -> InputItem:
    results = [value for name in _RESULTS if (value := getattr(item, name)) is not None]
    text = _note("input_image") if item.type == "image_generation_call" else "\n".join(map(_foreign_text, results))
    return InputItem(type="function_call_output", call_id=call_id or new_id("call"), output=text[:_MOST_FOREIGN_CHARS])


def _foreign_text(value: Any) -> str:
    return _note("computer_screenshot") if isinstance(value, dict) and "image_url" in value else _text(value)


def _text(value: Any) -> str:
    """JSON of what is no text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else _encode(value).decode()


def _content(content: Any, where: str, context: RequestContext, sees: bool = False) -> str | list[ResponseContentPart]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a text or a list of parts.", param=where)
    return [_part(part, f"{where}[{number}]", context, sees) for number, part in enumerate(content)]


def _part(part: Any, where: str, context: RequestContext, sees: bool) -> ResponseContentPart:
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be an object.", param=where)
    kind, text = part.get("type"), part.get("text")
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{where}.type is missing.", param=f"{where}.type")
    if kind == "refusal":
        text = part.get("refusal")
    if kind == "refusal" or kind in _TEXTS:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}.text is missing.", param=f"{where}.text")
        return ResponseContentPart("text", text)
    if kind == "input_image" and sees:
        fields = {name: part.get(name) for name in ("image_url", "detail", "file_id")}
        image = ResponseContentPart(kind, **{name: text for name, text in fields.items() if isinstance(text, str)})
        image_of_part(image, where)  # refused before anything is kept
        return image
    document = _document(part) if kind == "input_file" else None
    if document is not None:
        return ResponseContentPart("text", document)
    context.ignore(f"{where}.type", "models here read text only.")
    return ResponseContentPart("text", text if isinstance(text, str) else _note(kind, part.get("filename")))


def _note(kind: str, filename: object = None) -> str:
    name = f" ({filename[:_MOST_NAME_CHARS]})" if isinstance(filename, str) else ""
    return media_note(_NOTES.get(kind, "content") + name)


def _document(part: Mapping[str, Any]) -> str | None:
    """The text of a file that is sent with its content and is plain text, behind its name; else None."""
    data, filename = part.get("file_data"), part.get("filename")
    if not isinstance(data, str):
        return None
    try:
        text = b64decode(data.partition(";base64,")[2] or data, validate=True).decode()
    except ValueError:
        return None
    if "\0" in text or text.startswith("%PDF"):
        return None
    return f"{filename[:_MOST_NAME_CHARS]}:\n{text}" if isinstance(filename, str) else text
