"""Stages for tests: text in <think> tags is reasoning, <tool>name:arguments</tool> is a tool call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.tokenizers import OutputStage, Part, ReasoningPart, TextPart, ToolCallPart


class TaggedStage(OutputStage):
    """What stands between two tags goes to `_inside`."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._tags = (opening, closing)
        self._within = False
        self._held = ""

    def push(self, text: str) -> Sequence[Part]:
        parts: list[Part] = []
        before, tag, after = (self._held + text).partition(self._tags[self._within])
        while tag:
            parts += self._pass_on(before)
            parts += self._closed() if self._within else ()
            self._within = not self._within
            before, tag, after = after.partition(self._tags[self._within])
        tag = self._tags[self._within]
        kept = max(length for length in range(len(tag)) if before.endswith(tag[:length]))
        self._held = before[len(before) - kept :]
        return [*parts, *self._pass_on(before[: len(before) - kept])]

    def flush(self) -> Sequence[Part]:
        return self._pass_on(self._held)

    def _pass_on(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        return self._inside(text) if self._within else (TextPart(text),)

    def _inside(self, text: str) -> Sequence[Part]:
        raise NotImplementedError

    def _closed(self) -> Sequence[Part]:
        return ()


class ThinkStage(TaggedStage):
    def __init__(self) -> None:
        super().__init__("<think>", "</think>")

    def _inside(self, text: str) -> Sequence[Part]:
        return (ReasoningPart(text),)


class ToolStage(TaggedStage):
    """The name is held back until it is complete; arguments pass as they come. Without a colon it is no call."""

    def __init__(self) -> None:
        super().__init__("<tool>", "</tool>")
        self._calls = 0
        self._head: str | None = ""
        """What may become the name; None behind the colon."""

    def _inside(self, text: str) -> Sequence[Part]:
        if self._head is None:
            return (ToolCallPart(self._calls - 1, text),)
        self._head, colon, arguments = (self._head + text).partition(":")
        if not colon:
            return ()
        name, self._head = self._head, None
        self._calls += 1
        return (ToolCallPart(self._calls - 1, arguments, name),)

    def _closed(self) -> Sequence[Part]:
        head, self._head = self._head, ""
        return () if head is None else (TextPart("<tool>" + head + "</tool>"),)

    def flush(self) -> Sequence[Part]:
        parts = super().flush()
        return (TextPart("<tool>" + self._head),) if self._within and self._head is not None else parts


STAGES = (ThinkStage, ToolStage)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of the same kind, and of the same call, as one part."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ToolCallPart):
            if isinstance(last, ToolCallPart) and last.index == part.index:
                found[-1] = ToolCallPart(last.index, last.arguments + part.arguments, last.name, last.id)
                continue
        elif type(part) is type(last):
            found[-1] = type(part)(last.text + part.text)
            continue
        found.append(part)
    return found
