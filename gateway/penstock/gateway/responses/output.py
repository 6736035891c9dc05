"""What a model has written, as items of a response: reasoning, a message, or a function call, one behind the other."""

from __future__ import annotations

from typing import Any

from penstock.gateway.llm.dataplane import ChoiceDelta
from penstock.gateway.openai.logprobs import chat_logprobs
from penstock.gateway.openai.objects import ContentLogprob
from penstock.gateway.responses.encrypted_content import encode_reasoning
from penstock.gateway.responses.include import Include
from penstock.gateway.responses.items import new_id
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart


class OpenItem:
    """The item that is being written."""

    def __init__(self, part: Part) -> None:
        self.kind = kind_of(part)
        self.pieces: list[str] = []
        self.logprobs: list[ContentLogprob] = []
        match part:
            case TextPart():
                self.id = new_id("msg")
                self._fields: dict[str, Any] = {"type": "message", "role": "assistant"}
            case ReasoningPart():
                self.id = new_id("rs")
                self._fields = {"type": "reasoning", "summary": []}
            case ToolCallPart():
                self.id = new_id("fc")
                call = {"call_id": part.id or new_id("call"), "name": part.name or ""}
                self._fields = {"type": "function_call", **call}

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
        if self.type == "function_call":
            return {**head, "arguments": "".join(self.pieces)}
        return {**head, "content": [] if status == "in_progress" else [self.content()]}


def kind_of(part: Part) -> object:
    """The same for parts of one item, unless something else stands between them."""
    return part.index if isinstance(part, ToolCallPart) else type(part)


class Output:
    """Of one response. A subclass may send it as it grows."""

    def __init__(self, include: Include) -> None:
        self.items: list[dict[str, Any]] = []
        """Those that are complete."""
        self.finish_reason: str | None = None
        self._open: OpenItem | None = None
        self._include = include

    def add(self, delta: ChoiceDelta) -> None:
        parts = delta.parts
        if parts is None:
            parts = (TextPart(delta.text),) if delta.text or (self._include.logprobs and delta.logprobs) else ()
        for part in parts:
            item = self._item(part)
            piece = part.arguments if isinstance(part, ToolCallPart) else part.text
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
            shown = item.shown(status)
            if self._include.encrypted_reasoning and item.type == "reasoning":
                shown["encrypted_content"] = encode_reasoning("".join(item.pieces))
            self.items.append(shown)
            self._closed(item, shown)

    def _item(self, part: Part) -> OpenItem:
        if self._open is None or self._open.kind != kind_of(part):
            self.close("completed")
            self._open = OpenItem(part)
            self._opened(self._open)
        return self._open

    def _opened(self, item: OpenItem) -> None:
        """It is still empty; `len(items)` is its index."""

    def _grew(self, item: OpenItem, piece: str, logprobs: list[ContentLogprob]) -> None:
        """`piece` may be empty."""

    def _closed(self, item: OpenItem, shown: dict[str, Any]) -> None:
        """It is the last of `items`."""
