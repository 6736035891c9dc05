"""What a model has written, as items of a response: reasoning, a message, or a call, one behind the other."""

from __future__ import annotations

from typing import Any

from penstock.gateway.llm.dataplane import ChoiceDelta
from penstock.gateway.openai.logprobs import chat_logprobs
from penstock.gateway.openai.objects import ContentLogprob
from penstock.gateway.responses.encrypted_content import encode_reasoning
from penstock.gateway.responses.include import Include
from penstock.gateway.responses.items import RESPONSE_PREFIX, new_id
from penstock.gateway.responses.tools import NO_TOOLS, Callee, CustomInput, ResponseTools
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
