"""A stage whose parser reads the text as if it had all of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby

from ..output_stages import OutputStage, Part, ReasoningPart, TextPart, ToolCallPart
from .reader import Reader, Reading


class ParserStage(OutputStage):
    """`parse` reads from `reader` until the text ends, and says what it has found."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._parts: list[Part] = []
        self._calls = 0
        self._parsing = self.parse()

    @abstractmethod
    def parse(self) -> Reading[None]:
        """A generator: it calls the methods below."""

    def push(self, text: str) -> Sequence[Part]:
        self.reader.feed(text)
        next(self._parsing, None)
        return self._taken()

    def flush(self) -> Sequence[Part]:
        self.reader.end()
        next(self._parsing, None)
        return self._taken()

    def text(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._parts.append(ReasoningPart(text))

    def call(self, name: str, id: str | None = None) -> None:
        """A new tool call begins."""
        self._parts.append(ToolCallPart(self._calls, name=name, id=id))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        if text:
            self._parts.append(ToolCallPart(self._calls - 1, text))

    def _taken(self) -> Sequence[Part]:
        parts, self._parts = self._parts, []
        if len(parts) < 2:
            return parts
        return [_joined(list(group)) for _, group in groupby(parts, _kind)]


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, ToolCallPart) else 0


def _joined(parts: Sequence[Part]) -> Part:
    """Neighbours of one kind, and of the same call."""
    first = parts[0]
    if isinstance(first, ToolCallPart):
        pieces = [part.arguments for part in parts if isinstance(part, ToolCallPart)]
        return ToolCallPart(first.index, "".join(pieces), first.name, first.id)
    return type(first)("".join([part.text for part in parts if not isinstance(part, ToolCallPart)]))
