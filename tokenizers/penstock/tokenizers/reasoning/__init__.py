"""Parsers of reasoning, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..output_stages import OutputStage, StageFactory
from ..parsing import ParserRegistry
from .thoughts import (
    AnswerFrame,
    DeepSeekR1Stage,
    Gemma4Stage,
    Glm45ThoughtStage,
    GptOssReasoningStage,
    GraniteThoughtStage,
    KimiK2ThoughtStage,
    MiniMaxStage,
    MistralThoughtStage,
    Qwen3Stage,
    ThinkStage,
    ThoughtStage,
    ThoughtTags,
)

__all__ = [
    "GROUP",
    "AnswerFrame",
    "ReasoningParser",
    "ThoughtStage",
    "ThoughtTags",
    "find_reasoning_parser",
    "reasoning_parser_names",
]

GROUP = "penstock.reasoning_parsers"
_SHIPPED: dict[str, type[OutputStage]] = {
    "deepseek_r1": DeepSeekR1Stage,
    "gemma4": Gemma4Stage,
    "glm45": Glm45ThoughtStage,
    "gpt_oss": GptOssReasoningStage,
    "granite": GraniteThoughtStage,
    "kimi_k2": KimiK2ThoughtStage,
    "minimax": MiniMaxStage,
    "mistral": MistralThoughtStage,
    "qwen3": Qwen3Stage,
    "think": ThinkStage,
}
_registry = ParserRegistry("reasoning", GROUP, _SHIPPED)


class ReasoningParser:
    """What makes a stage for each choice of a request, given the end of the request's prompt."""

    def __init__(
        self,
        stage: Callable[[str], OutputStage],
        markers: tuple[str, ...],
        frame: Callable[[str], AnswerFrame] | None = None,
    ) -> None:
        self._stage = stage
        self.markers = markers
        """See `OutputStage.markers`."""
        self.frame = frame
        """What may stand before an answer, given the end of the prompt. None: not known, so no grammar can hold for the
        answer alone."""

    def __call__(self, prompt_end: str = "") -> StageFactory:
        """`prompt_end`: the last hundred characters of the rendered prompt. They tell whether the template has already
        opened the model's thought, or closed it. Without them the parser assumes what is usual for its models."""
        return partial(self._stage, prompt_end)


def find_reasoning_parser(name: str) -> ReasoningParser:
    """The parser of this name. Raises ValueError if there is none, with the names of all."""
    stage = _registry.find(name)
    return ReasoningParser(stage, stage.markers, getattr(stage, "frame", None))


def reasoning_parser_names() -> list[str]:
    """Those that ship with Penstock and those of other packages, sorted."""
    return _registry.names()
