"""What looks for reasoning and tool calls in the answers of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from penstock.engines.errors import UnsupportedError
from penstock.gateway.generating.tool_use import ToolUse
from penstock.gateway.llm.model_parsers import ModelParsers
from penstock.tokenizers import OutputStage, Part, StageFactory, TextPart, ToolCallPart


def answer_stages(parsers: ModelParsers, use: ToolUse, prompt_end: str) -> tuple[StageFactory, ...]:
    """`prompt_end` is that of the rendered prompt. Without calls in parallel, all but the first are left out. Beside
    forced calls there is no text: what looks like one is the beginning of a call that was cut off."""
    stages: list[StageFactory] = []
    if parsers.reasoning is not None:
        stages.append(parsers.reasoning(prompt_end))
    parser = use.parser(parsers)
    if use.tools and parser is not None:
        calls = parser(use.tools)
        calls = calls if use.in_parallel else _without(calls, _is_later_call)
        stages.append(_without(calls, _is_text) if use.is_forced else calls)
    return tuple(stages)


def check_tool_parser(parsers: ModelParsers, use: ToolUse) -> None:
    """Raises UnsupportedError for tools where calls cannot be told from text."""
    if use.tools and use.parser(parsers) is None:
        message = "tools: this model's chat template shows no format of calls that the server knows (--tool-parser)."
        raise UnsupportedError(message, param="tools")


def check_reasoning_parser(parsers: ModelParsers, param: str) -> None:
    """Raises UnsupportedError where reasoning cannot be told from text; `param` is the field that asks for it."""
    if parsers.reasoning is None:
        message = f"{param}: this model's chat template shows no reasoning (--reasoning-parser)."
        raise UnsupportedError(message, param=param)


def _is_later_call(part: Part) -> bool:
    return isinstance(part, ToolCallPart) and part.index > 0


def _is_text(part: Part) -> bool:
    return isinstance(part, TextPart)


class _Filter(OutputStage):
    def __init__(self, make: StageFactory, dropped: Callable[[Part], bool]) -> None:
        self._stage = make()
        self._dropped = dropped

    def push(self, text: str) -> Sequence[Part]:
        return [part for part in self._stage.push(text) if not self._dropped(part)]

    def flush(self) -> Sequence[Part]:
        return [part for part in self._stage.flush() if not self._dropped(part)]


def _without(make: StageFactory, dropped: Callable[[Part], bool]) -> StageFactory:
    """The same stage, with some of what it finds left out."""
    return partial(_Filter, make, dropped)
