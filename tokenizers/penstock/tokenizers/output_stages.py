"""Stages that find parts in a choice's text while it is generated: each parser of reasoning or tool calls is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import msgspec


class TextPart(msgspec.Struct, frozen=True, gc=False):
    """More of the answer."""

    text: str


class ReasoningPart(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before or between its answers."""

    text: str


class ToolCallPart(msgspec.Struct, frozen=True, gc=False):
    """More of one tool call. A call may be a single part, or have its arguments in many."""

    index: int
    """Which call of the choice, from 0."""
    arguments: str = ""
    """What is new of them. Joined over the call's parts, they are JSON as the model wrote it."""
    name: str | None = None
    """In the call's first part, and only there."""
    id: str | None = None
    """In the call's first part, if the model has written one."""


Part = TextPart | ReasoningPart | ToolCallPart


class OutputStage(ABC):
    """One parser at work on one choice. It may keep state.

    Text arrives cut anywhere: several tokens at once, or half a tag. However it is cut, the parts of each kind must be
    the same once they are joined.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """What the stage looks for. Where the tokenizer has special tokens for these, they must stay in the text."""

    @abstractmethod
    def push(self, text: str) -> Sequence[Part]:
        """Takes new text, which is never empty, and holds back what may still turn out to be something else."""

    def flush(self) -> Sequence[Part]:
        """What was held back, when no more text comes. Called once."""
        return ()


StageFactory = Callable[[], OutputStage]
"""Makes the stage of one choice."""


class StageChain(OutputStage):
    """Stages in a row. Each sees what the one before it has left as text. Other parts pass it by, also before text that
    it holds back."""

    def __init__(self, factories: Iterable[StageFactory]) -> None:
        self._stages = [make() for make in factories]

    def push(self, text: str) -> Sequence[Part]:
        parts: Sequence[Part] = (TextPart(text),)
        for stage in self._stages:
            parts = _through(stage, parts)
        return parts

    def flush(self) -> Sequence[Part]:
        parts: Sequence[Part] = ()
        for stage in self._stages:
            parts = [*_through(stage, parts), *stage.flush()]
        return parts


def _through(stage: OutputStage, parts: Sequence[Part]) -> list[Part]:
    result: list[Part] = []
    for part in parts:
        if isinstance(part, TextPart):
            result += stage.push(part.text)
        else:
            result.append(part)
    return result
