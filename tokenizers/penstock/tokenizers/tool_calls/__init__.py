"""Parsers of tool calls, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..output_stages import OutputStage, StageFactory
from ..parsing import ParserRegistry
from .call_form import CallForm, Tool
from .gemma import GemmaStage
from .gpt_oss import GptOssStage
from .json_formats import GraniteStage, HermesStage, JsonListStage, LlamaJsonStage, MistralStage, Phi4MiniStage
from .pythonic import PythonicStage
from .sections import DeepSeekV3Stage, DeepSeekV31Stage, KimiK2Stage
from .stage import ToolCallStage
from .xml_formats import Glm45Stage, MiniMaxM2Stage, Qwen3CoderStage

__all__ = [
    "GROUP",
    "JSON_LIST_OF_CALLS",
    "CallForm",
    "Tool",
    "ToolCallStage",
    "ToolParser",
    "find_tool_parser",
    "tool_parser_names",
]

GROUP = "penstock.tool_parsers"
_SHIPPED: dict[str, type[OutputStage]] = {
    "deepseek_v3": DeepSeekV3Stage,
    "deepseek_v31": DeepSeekV31Stage,
    "functiongemma": GemmaStage,
    "gemma": GemmaStage,
    "gemma4": GemmaStage,
    "glm45": Glm45Stage,
    "glm47": Glm45Stage,
    "gpt_oss": GptOssStage,
    "granite": GraniteStage,
    "hermes": HermesStage,
    "kimi_k2": KimiK2Stage,
    "llama3_json": LlamaJsonStage,
    "llama4_json": LlamaJsonStage,
    "llama4_pythonic": PythonicStage,
    "minimax_m2": MiniMaxM2Stage,
    "mistral": MistralStage,
    "phi4_mini_json": Phi4MiniStage,
    "pythonic": PythonicStage,
    "qwen2.5": HermesStage,
    "qwen3": HermesStage,
    "qwen3_coder": Qwen3CoderStage,
}
_registry = ParserRegistry("tool", GROUP, _SHIPPED)


class ToolParser:
    """What makes a stage for each choice of a request, given the request's tools."""

    def __init__(
        self,
        stage: Callable[[Sequence[Tool]], OutputStage],
        markers: tuple[str, ...],
        form: CallForm | None = None,
    ) -> None:
        self._stage = stage
        self.markers = markers
        """See `OutputStage.markers`."""
        self.form = form
        """How a grammar makes a model write calls that this parser reads; None: it cannot."""

    def __call__(self, tools: Sequence[Tool]) -> StageFactory:
        return partial(self._stage, tools)


JSON_LIST_OF_CALLS = ToolParser(JsonListStage, (), JsonListStage.form)
"""Calls as a JSON list: any model can write them where a grammar makes it."""


def find_tool_parser(name: str) -> ToolParser:
    """The parser of this name. Raises ValueError if there is none, with the names of all."""
    stage = _registry.find(name)
    return ToolParser(stage, stage.markers, getattr(stage, "form", None))


def tool_parser_names() -> list[str]:
    """Those that ship with Penstock and those of other packages, sorted."""
    return _registry.names()
