"""Parsers of reasoning and tool calls at work on text, however it is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.tokenizers import (
    OutputStage,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCallPart,
    find_reasoning_parser,
    find_tool_parser,
)

TOOLS = (
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "wind": {"type": "boolean"},
                "place": {"type": "object"},
                "level": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            },
        },
    ),
    Tool("clock"),
)


class Call(NamedTuple):
    name: str
    arguments: str
    id: str | None = None


class Found(NamedTuple):
    """What is left when parts of a kind are joined."""

    text: str = ""
    calls: list[Call] = []  # noqa: RUF012 (nobody changes it)
    reasoning: str = ""


def tool_stage(name: str, tools: Sequence[Tool] = TOOLS) -> OutputStage:
    return find_tool_parser(name)(tools)()


def reasoning_stage(name: str, prompt_end: str = "") -> OutputStage:
    return find_reasoning_parser(name)(prompt_end)()


def pushed(stage: OutputStage, pieces: Iterable[str]) -> list[Part]:
    return [*(part for piece in pieces if piece for part in stage.push(piece)), *stage.flush()]


def found(parts: Iterable[Part]) -> Found:
    """Also checks the order that streams need: calls count from 0, and only the first part of one has a name or id."""
    calls: list[Call] = []
    text = reasoning = ""
    for part in parts:
        match part:
            case TextPart():
                assert part.text
                text += part.text
            case ReasoningPart():
                assert part.text
                reasoning += part.text
            case ToolCallPart(name=None):
                assert part.index == len(calls) - 1
                assert part.id is None
                assert part.arguments
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + part.arguments)
            case _:
                assert part.index == len(calls)
                assert part.name
                calls.append(Call(part.name, part.arguments, part.id))
    return Found(text, calls, reasoning)
