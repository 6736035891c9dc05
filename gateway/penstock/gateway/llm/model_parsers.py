"""What finds reasoning and tool calls in a model's output: named by the operator, or seen in its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.gateway.configuration.config import ConfigError
from penstock.tokenizers import (
    ChatTemplate,
    ReasoningParser,
    Tokenizer,
    ToolParser,
    detect_reasoning_parser,
    detect_tool_parser,
    find_reasoning_parser,
    find_tool_parser,
)
from penstock.tokenizers.parsing import harmony

AUTO, NONE = "auto", "none"
_THOUGHT_TAGS = ("<think>", "</think>")
_P = TypeVar("_P")


@dataclass(frozen=True, slots=True)
class ModelParsers:
    tools: ToolParser | None = None
    """None: calls cannot be told from text, so requests cannot have tools."""
    reasoning: ReasoningParser | None = None
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that the parsers look for."""
    added_texts: Mapping[str, int] = field(default_factory=dict)
    """`Tokenizer.added_texts`: grammars write these tokens by number."""
    own_tags: frozenset[str] = frozenset(_THOUGHT_TAGS)
    """What clients may send back in an assistant's content as the model wrote it."""


NO_PARSERS = ModelParsers()


def choose_parsers(tools: str, reasoning: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> ModelParsers:
    """`tools`, `reasoning`: a parser's name, auto, or none. Raises ConfigError for names that there are not."""
    calls, thoughts = _detected(template)
    tool_parser = _chosen("tool-parser", tools, calls, find_tool_parser)
    reasoning_parser = _chosen("reasoning-parser", reasoning, thoughts, find_reasoning_parser)
    markers = [marker for parser in (tool_parser, reasoning_parser) if parser for marker in parser.markers]
    return ModelParsers(
        tool_parser,
        reasoning_parser,
        shown_tokens=tokenizer.special_ids_of(markers),
        added_texts=tokenizer.added_texts,
        # Those of gpt-oss also begin and end turns, and no client ever sees them.
        own_tags=frozenset([*_THOUGHT_TAGS, *markers]) - set(harmony.MARKERS),
    )


def _detected(template: ChatTemplate | None) -> tuple[str | None, str | None]:
    """For calls and for reasoning. A template that is for chats with tools alone is the one that shows calls."""
    if template is None:
        return None, None
    with_tools = template.with_tools.source
    reasoning = detect_reasoning_parser(template.source) or detect_reasoning_parser(with_tools)
    return detect_tool_parser(with_tools), reasoning


def _chosen(flag: str, given: str, detected: str | None, find: Callable[[str], _P]) -> _P | None:
    name = detected if given == AUTO else given
    if name is None or name == NONE:
        return None
    try:
        return find(name)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
