"""The events of a stream: https://platform.openai.com/docs/api-reference/responses-streaming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.generating.streams import COMMENT
from penstock.gateway.http.error_form import OpenAIErrors
from penstock.gateway.llm.dataplane import ChoiceDelta
from penstock.gateway.openai.objects import ContentLogprob
from penstock.gateway.responses.answer import ResponseObject
from penstock.gateway.responses.include import Include
from penstock.gateway.responses.output import OpenItem, Output
from penstock.gateway.responses.tools import NO_TOOLS, ResponseTools

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
