"""System prompt and messages as chat templates know them, which is OpenAI's form. A history is shown as well as it can
be, and never refused for what it holds; what a user or a tool has said stays theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.anthropic.schemas import AnthropicMessage, Block
from penstock.gateway.generating.answer_shape import MALFORMED
from penstock.gateway.generating.request_reading import media_note
from penstock.gateway.models.language.images.reader import RequestImage, image_of_url
from penstock.gateway.requests.bounded_json import decode_json
from penstock.gateway.requests.context import RequestContext

_TEXTS = ("title", "context", "url", "tool_name", "text", "stdout", "stderr", "error_code")
"""Fields with text, of blocks that other blocks hold and of what tools of Anthropic's servers return."""
_AS_THEY_ARE = frozenset({"document", "image", "search_result", "tool_reference", "tool_result"})
"""Blocks of which all is shown, or a note says what is not. That others have become text, or nothing, is noted."""


Piece = str | dict[str, Any]
"""A text, or an image as a part of a message."""
ShowImage = Callable[[Any, str, RequestContext], Piece]
"""Of an image's source and place in the request."""


def noted_image(source: Any, where: str, context: RequestContext) -> Piece:
    context.ignore(where, "this model reads text only: a note stands for the image.")
    return media_note("image")


def shown_image(source: Any, where: str, context: RequestContext) -> Piece:
    """Raises InvalidRequestError for a source without an image."""
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return {"type": "image", "image": RequestImage(source["data"], f"{where}.source")}
    if source.get("type") == "file" and isinstance(source.get("file_id"), str):
        return {"type": "image", "image": RequestImage("", f"{where}.source.file_id", file_id=source["file_id"])}
    return {"type": "image", "image": image_of_url(source.get("url"), None, f"{where}.source")}


@dataclass(frozen=True, slots=True)
class ContentReader:
    """Makes of blocks what a model reads. Notes what is lost."""

    context: RequestContext
    show: ShowImage = noted_image

    def block(self, block: Block, where: str) -> list[Piece]:
        """Of a block, whatever its type; empty: there is nothing to read."""
        if block.type == "text":
            return [block.text or ""]
        if block.type not in _AS_THEY_ARE:
            self.context.ignore(where, "blocks of this type are shown as their text, or left out where they have none.")
        texts = (block.title, block.context, block.url, block.tool_name, block.text)
        return self._pieces(block.type, texts, block.source, block.content, where)

    def content(self, content: Any, where: str) -> list[Piece]:
        """Of a block's own content: a text, blocks, or the object that a tool has returned."""
        if isinstance(content, str):
            return [content]
        blocks = [content] if isinstance(content, dict) else content if isinstance(content, list) else []
        return [piece for number, block in enumerate(blocks) for piece in self._inner(block, f"{where}[{number}]")]

    def text(self, block: Block, where: str) -> str:
        """Of a block that no image is expected in."""
        return "\n".join([piece for piece in self.block(block, where) if isinstance(piece, str)])

    def _inner(self, block: Any, where: str) -> list[Piece]:
        """`block`: one that was read as such, or of any type."""
        if isinstance(block, Block):
            return self.block(block, where)
        if not isinstance(block, dict):
            self.context.ignore(where, "this is no block, and left out.")
            return []
        texts = [block.get(name) for name in _TEXTS]
        return self._pieces(block.get("type"), texts, block.get("source"), block.get("content"), where)

    def _pieces(self, kind: Any, texts: Iterable[Any], source: Any, content: Any, where: str) -> list[Piece]:
        """Its texts are one, as far as no image stands between them."""
        if kind == "image":
            return [self.show(source, where, self.context)]
        shown: list[Piece] = [text for text in texts if isinstance(text, str) and text]
        if source is not None or kind == "document":
            shown += self._source(kind, source, f"{where}.source")
        if content is not None:
            shown += self.content(content, f"{where}.content")
        return _with_joined_texts(shown)

    def _source(self, kind: Any, source: Any, where: str) -> list[Piece]:
        """Of a document its text, of a search result where it is from."""
        if isinstance(source, str):
            return [source]
        form = source.get("type") if isinstance(source, dict) else None
        if form == "text" and isinstance(source.get("data"), str):
            return [source["data"]]
        if form == "content":
            return self.content(source.get("content"), f"{where}.content")
        if kind != "document":
            return []
        self.context.ignore(where, "this model reads text only: a note stands for the document.")
        return [media_note("document")]


def _with_joined_texts(pieces: Iterable[Piece]) -> list[Piece]:
    """Texts that follow each other are lines of one."""
    joined: list[Piece] = []
    for are_texts, run in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        same = list(run)
        joined += ["\n".join(map(str, same))] if are_texts else same
    return joined


def _as_content(pieces: list[Piece]) -> str | list[dict[str, Any]]:
    """One text, or parts where there is an image."""
    joined = _with_joined_texts(pieces)
    if len(joined) <= 1 and all(isinstance(piece, str) for piece in joined):
        return "".join(map(str, joined))
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in joined]


def _as_pieces(content: str | list[dict[str, Any]]) -> list[Piece]:
    """`_as_content`, back again."""
    parts = [content] if isinstance(content, str) else content
    return [part["text"] if isinstance(part, dict) and part["type"] == "text" else part for part in parts]


_ROLES = frozenset({"user", "assistant", "system"})
_CALL, _RESULT = "tool_use", "tool_result"
"""How the types of calls end and of what they have returned: `server_tool_use`, `mcp_tool_result`."""
_NO_CALL = "this names no call of an earlier assistant message."
_BILLING = "x-anthropic-billing-header"
"""Claude Code opens its system prompt with a block of this name that differs from request to request. It says nothing
to a model, and no cached prefix would ever fit."""


def template_messages(
    system: str | list[Block] | None,
    messages: list[AnthropicMessage],
    context: RequestContext,
    *,
    reads_images: bool = False,
) -> list[dict[str, Any]]:
    """Each call is followed by its result. The last message, if it is the assistant's, has text for an answer to go on
    with. Raises InvalidRequestError where there is no message, and for images that are not sent with the request where
    the model `reads_images`."""
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    reader = ContentReader(context, shown_image if reads_images else noted_image)
    turns = [[message] for message in _system_messages(system, ContentReader(context))]
    calls: set[str] = set()
    for number, message in enumerate(messages):
        for translated in _translated(message, f"messages[{number}]", calls, reader):
            _add(turns, translated)
    joined = [_joined(turn) for turn in turns]
    if calls:
        joined = _with_all_results(joined, context)
    return _without_empty_end(joined, context)


def continues(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer goes on with the last of `template_messages`, which is the assistant's then."""
    return bool(messages[-1]["role"] == "assistant")


def _system_messages(system: str | list[Block] | None, reader: ContentReader) -> list[dict[str, Any]]:
    pieces = [system or ""] if not isinstance(system, list) else reader.content(system, "system")
    text = "\n".join([text for text in pieces if isinstance(text, str) and not text.startswith(_BILLING)])
    return [{"role": "system", "content": text}] if text else []


def _translated(message: AnthropicMessage, where: str, calls: set[str], reader: ContentReader) -> list[dict[str, Any]]:
    """`calls` has the ids of all calls so far."""
    role, content = message.role, message.content
    if role not in _ROLES:
        reader.context.ignore(f"{where}.role", "roles are user, assistant and system: it is the user's.")
        role = "user"
    if not isinstance(content, list):
        return [{"role": role, "content": content or ""}]
    blocks = [(block, f"{where}.content[{number}]") for number, block in enumerate(content)]
    if role == "assistant":
        return _assistant(blocks, calls, reader)
    return _incoming(role, blocks, calls, reader if role == "user" else ContentReader(reader.context))


def _incoming(
    role: str, blocks: list[tuple[Block, str]], calls: set[str], reader: ContentReader
) -> list[dict[str, Any]]:
    """Results stand before the text. One of an unknown call is the user's text, and nothing in a system message, which
    no tool can write."""
    results: list[dict[str, Any]] = []
    pieces: list[Piece] = []
    for block, place in blocks:
        is_result = block.type.endswith(_RESULT)
        if is_result and role == "user" and block.tool_use_id in calls:
            results.append(_tool_message(block, place, reader))
            continue
        if is_result:
            reader.context.ignore(f"{place}.tool_use_id", _NO_CALL)
        if not is_result or role != "system":
            pieces += reader.block(block, place)
    return results if results and not pieces else [*results, {"role": role, "content": _as_content(pieces)}]


def _assistant(blocks: list[tuple[Block, str]], calls: set[str], reader: ContentReader) -> list[dict[str, Any]]:
    """What a model has written in pieces is put together without anything between them. A result among them, as tools
    of Anthropic's servers have, divides the message."""
    messages: list[dict[str, Any]] = []
    turn = _AssistantTurn(reader.context)
    for block, place in blocks:
        if not block.type.endswith(_RESULT):
            turn.add(block, place, calls)
        elif block.tool_use_id in calls:
            messages += [] if turn.is_empty else [turn.message()]
            messages.append(_tool_message(block, place, reader))
            turn = _AssistantTurn(reader.context)
        else:
            reader.context.ignore(f"{place}.tool_use_id", _NO_CALL)
    return messages if messages and turn.is_empty else [*messages, turn.message()]


class _AssistantTurn:
    """What the assistant says and calls, up to a tool's result."""

    def __init__(self, context: RequestContext) -> None:
        self._reader = ContentReader(context)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._called: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        return not (self._texts or self._thoughts or self._called)

    def add(self, block: Block, where: str, calls: set[str]) -> None:
        if block.type == "thinking":
            self._thoughts.append(block.thinking or "")
        elif block.type.endswith(_CALL) and block.id and block.name:
            self._called.append(_call(block, where, self._reader.context))
            calls.add(block.id)
        else:
            text = self._reader.text(block, where)
            self._texts.append(text if block.type == "text" or not text else f"{text}\n")

    def message(self) -> dict[str, Any]:
        result: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if self._thoughts:
            result["reasoning_content"] = "".join(self._thoughts)
        if self._called:
            result["tool_calls"] = self._called
        return result


def _call(block: Block, where: str, context: RequestContext) -> dict[str, Any]:
    if block.type != _CALL:
        context.ignore(where, "no server runs this tool here: it is shown as a call of the client's.")
    arguments = _arguments(block.input, f"{where}.input", context)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _arguments(arguments: Any, where: str, context: RequestContext) -> dict[str, Any]:
    """A call's input: an object, also where it is the text of one."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        with suppress(InvalidRequestError):
            return decode_json(arguments.encode(), dict[str, Any])
    context.ignore(where, "the input is not an object.")
    return {MALFORMED: arguments}


def _tool_message(block: Block, where: str, reader: ContentReader) -> dict[str, Any]:
    content = _as_content(reader.content(block.content, f"{where}.content"))
    if block.type != _RESULT:
        reader.context.ignore(where, "no server runs this tool here: it is shown as a result of the client's.")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _with_all_results(messages: list[dict[str, Any]], context: RequestContext) -> list[dict[str, Any]]:
    """With an empty result of each call that has none before the assistant's next message: a client was interrupted.
    Many templates, and models, want one for each."""
    done: list[dict[str, Any]] = []
    waiting: dict[str, None] = {}
    end = 0
    for message in messages:
        role = message["role"]
        if role == "assistant":
            _fill(done, end, waiting, context)
            waiting = dict.fromkeys(call["id"] for call in message.get("tool_calls", ()))
        elif role == "tool":
            waiting.pop(message["tool_call_id"], None)
        done.append(message)
        if role in ("assistant", "tool"):
            end = len(done)
    _fill(done, end, waiting, context)
    return done


def _fill(done: list[dict[str, Any]], end: int, waiting: dict[str, None], context: RequestContext) -> None:
    """`end`: behind the last of the calls' own results."""
    if waiting:
        context.ignore("messages", "a tool_use has no tool_result: the model is shown an empty one.")
        done[end:end] = [{"role": "tool", "tool_call_id": call, "content": ""} for call in waiting]


def _without_empty_end(messages: list[dict[str, Any]], context: RequestContext) -> list[dict[str, Any]]:
    """An answer does not go on with nothing, or with a thought: it starts over."""
    last = messages[-1]
    if last["role"] != "assistant" or last["content"]:
        return messages
    if len(messages) == 1:
        raise InvalidRequestError("messages: the last one has no text to continue.", param="messages")
    context.ignore("messages", "the last message of the assistant has no text to continue.")
    return messages[:-1]


def _add(turns: list[list[dict[str, Any]]], message: dict[str, Any]) -> None:
    """Messages of the same side that follow each other are one turn: many templates want the sides to alternate."""
    role = message["role"]
    if role in ("user", "assistant") and turns and turns[-1][0]["role"] == role:
        turns[-1].append(message)
    else:
        turns.append([message])


def _joined(turn: list[dict[str, Any]]) -> dict[str, Any]:
    """One message. All are joined at once: a body can hold very many, and each `+` would copy all before it."""
    if len(turn) == 1:
        return turn[0]
    role = turn[0]["role"]
    joined: dict[str, Any] = {"role": role}
    if role == "user":
        joined["content"] = _as_content([piece for message in turn for piece in _as_pieces(message["content"])])
    else:
        joined["content"] = "".join([message["content"] for message in turn])
    thoughts = [message["reasoning_content"] for message in turn if "reasoning_content" in message]
    if thoughts:
        joined["reasoning_content"] = "".join(thoughts)
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined
