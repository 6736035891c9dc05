"""The events of a stream: https://platform.openai.com/docs/api-reference/responses-streaming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.gateway.apis.openai.objects import ContentLogprob, chat_logprobs
from penstock.gateway.apis.responses.answer import ResponseObject
from penstock.gateway.apis.responses.items import RESPONSE_PREFIX, encode_reasoning, new_id
from penstock.gateway.apis.responses.schemas import Include
from penstock.gateway.apis.responses.tools import NO_TOOLS, Callee, CustomInput, ResponseTools
from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.generating.streams import COMMENT
from penstock.gateway.models.language.dataplane import ChoiceDelta
from penstock.gateway.transports.http.error_form import OpenAIErrors
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart


class OpenItem:
    """The item that is being written."""

    def __init__(self, part: Part, number: str, tools: ResponseTools) -> None:
        """`number`: what stands behind the type in the item's id."""
        self.kind = kind_of(part)
        self.pieces: list[str] = []
        self.logprobs: list[ContentLogprob] = []
        self._custom: CustomInput | None = None
        match part:
            case TextPart():
                self.id = f"msg_{number}"
                self._fields: dict[str, Any] = {"type": "message", "role": "assistant"}
            case ReasoningPart():
                self.id = f"rs_{number}"
                self._fields = {"type": "reasoning", "summary": []}
            case ToolCallPart():
                self._begin_call(part, number, tools)

    def _begin_call(self, part: ToolCallPart, number: str, tools: ResponseTools) -> None:
        callee = tools.callees.get(part.name or "") or Callee(part.name or "")
        self._custom = CustomInput() if callee.is_custom else None
        self.id = f"{'ctc' if callee.is_custom else 'fc'}_{number}"
        kind = "custom_tool_call" if callee.is_custom else "function_call"
        self._fields = {"type": kind, "call_id": part.id or new_id("call"), "name": callee.name}
        if callee.namespace is not None:
            self._fields["namespace"] = callee.namespace

    @property
    def is_call(self) -> bool:
        return isinstance(self.kind, int)

    @property
    def written(self) -> str:
        """The field of a call that is being written."""
        return "arguments" if self._custom is None else "input"

    def read(self, part: Part) -> str:
        """What of the part is shown."""
        if not isinstance(part, ToolCallPart):
            return part.text
        return part.arguments if self._custom is None else self._custom.read(part.arguments)

    def rest(self) -> str:
        """What is shown beside that at the end."""
        return "" if self._custom is None else self._custom.rest()

    @property
    def type(self) -> str:
        return str(self._fields["type"])

    def content(self) -> dict[str, Any]:
        """The one part of a message's or a thought's content, as far as it is written."""
        text = "".join(self.pieces)
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def shown(self, status: str) -> dict[str, Any]:
        """`in_progress`: as it is when it begins."""
        head = {"id": self.id, **self._fields, "status": status}
        if self.is_call:
            return {**head, self.written: "".join(self.pieces)}
        return {**head, "content": [] if status == "in_progress" else [self.content()]}


def kind_of(part: Part) -> object:
    """The same for parts of one item, unless something else stands between them."""
    return part.index if isinstance(part, ToolCallPart) else type(part)


class Output:
    """Of one response. A subclass may send it as it grows."""

    def __init__(self, include: Include, tools: ResponseTools = NO_TOOLS, response_id: str | None = None) -> None:
        """The ids of the items have what is behind the prefix of `response_id`, so that an item is found again."""
        self._numbers = (response_id or new_id("resp")).removeprefix(RESPONSE_PREFIX)
        self._tools = tools
        self.items: list[dict[str, Any]] = []
        """Those that are complete."""
        self.finish_reason: str | None = None
        self._open: OpenItem | None = None
        self._include = include

    def add(self, delta: ChoiceDelta) -> None:
        parts = delta.parts
        if parts is None:
            parts = (TextPart(delta.text),) if delta.text or (self._include.logprobs and delta.logprobs) else ()
        most = self._tools.most_calls
        for part in parts:
            if most is not None and isinstance(part, ToolCallPart) and part.index >= most:
                continue
            item = self._item(part)
            piece = item.read(part)
            logprobs = chat_logprobs(delta.logprobs).content if self._include.logprobs and delta.logprobs else []
            item.pieces.append(piece)
            item.logprobs += logprobs
            self._grew(item, piece, logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.close("incomplete" if delta.finish_reason == "length" else "completed")

    def close(self, status: str) -> None:
        """Ends the item that is being written."""
        item, self._open = self._open, None
        if item is not None:
            if rest := item.rest():
                item.pieces.append(rest)
                self._grew(item, rest, [])
            shown = item.shown(status)
            if self._include.encrypted_reasoning and item.type == "reasoning":
                shown["encrypted_content"] = encode_reasoning("".join(item.pieces))
            self.items.append(shown)
            self._closed(item, shown)

    def _item(self, part: Part) -> OpenItem:
        if self._open is None or self._open.kind != kind_of(part):
            self.close("completed")
            self._open = OpenItem(part, f"{self._numbers}{len(self.items):04x}", self._tools)
            self._opened(self._open)
        return self._open

    def _opened(self, item: OpenItem) -> None:
        """It is still empty; `len(items)` is its index."""

    def _grew(self, item: OpenItem, piece: str, logprobs: list[ContentLogprob]) -> None:
        """`piece` may be empty."""

    def _closed(self, item: OpenItem, shown: dict[str, Any]) -> None:
        """It is the last of `items`."""


_encode = msgspec.json.Encoder().encode
_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}


class ResponseEvents(Output):
    """Of one response. Nearly all of a delta's event is the same from token to token, so it is made when the item is
    opened, and only the number and the JSON of what is new are spliced in."""

    heartbeat = COMMENT

    def __init__(
        self,
        response: ResponseObject,
        keep: Callable[[dict[str, Any]], None],
        include: Include,
        tools: ResponseTools = NO_TOOLS,
    ) -> None:
        """`keep` is given the response when it has ended, and may change it."""
        super().__init__(include, tools, response.id)
        self.live = 1
        self.begun = False
        self.response = response
        self._keep = keep
        self.number = 0
        """Of the next event."""
        self._frames: list[bytes] = []
        self._delta = b""
        """What stands before the number of a delta's event."""

    def opening(self) -> bytes:
        self.begun = True
        shown = self.response.begun()
        self._event("response.created", response=shown)
        self._event("response.in_progress", response=shown)
        return self._taken()

    def queued(self) -> bytes:
        """Instead of `opening`, for a response that begins later: with `started`."""
        self.begun = True
        shown = self.response.queued()
        self._event("response.created", response=shown)
        self._event("response.queued", response=shown)
        return self._taken()

    def started(self) -> bytes:
        self._event("response.in_progress", response=self.response.begun())
        return self._taken()

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        for delta in deltas:
            self.add(delta)
            if delta.finish_reason is not None:
                self.live = 0
        return self._taken()

    def ending(self) -> bytes:
        response = self.response.ended(self.items, self.finish_reason)
        self._end(response)
        return self._taken()

    def failing(self, error: Exception) -> bytes:
        """Instead of `ending`: the item that was being written is incomplete."""
        return self._cut_off(lambda items: self.response.failed(items, error))

    def cancelling(self) -> bytes:
        """Instead of `ending`."""
        return self._cut_off(self.response.cancelled)

    def _cut_off(self, ended: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]) -> bytes:
        self.close("incomplete")
        self._end(ended(self.items))
        return self._taken()

    def _end(self, response: dict[str, Any]) -> None:
        self._keep(response)
        status = response["status"]
        kind = "failed" if status == "cancelled" else status  # there is no event of its own for those
        self._event(f"response.{kind}", response=response)

    def _opened(self, item: OpenItem) -> None:
        index = len(self.items)
        self._event("response.output_item.added", output_index=index, item=item.shown("in_progress"))
        place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        if not item.is_call:
            place["content_index"] = 0
            self._event("response.content_part.added", **place, part=item.content())
        self._delta = _head(_DELTAS[item.type]) + _encode(place)[1:-1] + b',"sequence_number":'

    def _grew(self, item: OpenItem, piece: str, logprobs: list[ContentLogprob]) -> None:
        if not piece and not logprobs:
            return
        more = b',"logprobs":%b' % _encode(logprobs) if item.type == "message" else b""
        self._frames += (self._delta, b'%d%b,"delta":' % (self.number, more), _encode(piece), b"}\n\n")
        self.number += 1

    def _closed(self, item: OpenItem, shown: dict[str, Any]) -> None:
        index = len(self.items) - 1
        place = {"item_id": item.id, "output_index": index}
        if item.is_call:
            self._event(_DELTAS[item.type].replace("delta", "done"), **place, **{item.written: shown[item.written]})
        else:
            content = item.content()
            text = {name: content[name] for name in ("text", "logprobs") if name in content}
            kind = "output_text" if item.type == "message" else "reasoning_text"
            self._event(f"response.{kind}.done", **place, content_index=0, **text)
            self._event("response.content_part.done", **place, content_index=0, part=content)
        self._event("response.output_item.done", output_index=index, item=shown)

    def _event(self, name: str, **fields: object) -> None:
        self._frames.append(_head(name) + _encode({"sequence_number": self.number, **fields})[1:] + b"\n\n")
        self.number += 1

    def _taken(self) -> bytes:
        frames, self._frames = self._frames, []
        return b"".join(frames)


def _head(name: str) -> bytes:
    return b'event: %b\ndata: {"type":"%b",' % (name.encode(), name.encode())


class StreamErrors(OpenAIErrors):
    """The error form of one stream."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def last_events(self, error: Exception, request_id: str) -> bytes:
        """A response that has begun has failed; before that, there is only the error to tell of."""
        if self._events.begun:
            return self._events.failing(error)
        return error_event(error, 0)


def error_event(error: Exception, number: int) -> bytes:
    body = {"code": wire_shape(error).code, "message": public_message(error), "param": None, "sequence_number": number}
    return _head("error") + _encode(body)[1:] + b"\n\n"
