"""What a model's output is made of: text, and what stages find in it. A part is never empty."""

from __future__ import annotations

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
