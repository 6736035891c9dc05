"""Whether and how hard the model is to think, as chat templates are told."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.anthropic.schemas import OutputConfig, Thinking
from penstock.gateway.generating.answer_stages import check_reasoning_parser
from penstock.gateway.llm.model_parsers import ModelParsers

_ENABLED = {"enabled": True, "adaptive": True, "disabled": False}


def template_kwargs(thinking: Thinking | None, output: OutputConfig | None, parsers: ModelParsers) -> dict[str, Any]:
    """Effort is only a hint, so that a model which does not think may answer, too. Raises InvalidRequestError,
    UnsupportedError."""
    kwargs: dict[str, Any] = {}
    if thinking is not None:
        if thinking.type not in _ENABLED:
            raise InvalidRequestError("thinking.type must be enabled, adaptive or disabled.", param="thinking.type")
        if thinking.type == "enabled":
            check_reasoning_parser(parsers, "thinking")
        kwargs["enable_thinking"] = _ENABLED[thinking.type]
    if output is not None and output.effort is not None and parsers.reasoning is not None:
        kwargs["reasoning_effort"] = output.effort
    return kwargs


def check_budget(thinking: Thinking | None, max_tokens: int) -> None:
    """Raises UnsupportedError for a budget that `max_tokens` would not keep by itself: nothing here ends a thought."""
    if thinking is None or thinking.budget_tokens is None:
        return
    if thinking.budget_tokens < max_tokens - 1:
        message = (
            "thinking.budget_tokens is not supported: this server cannot end a thought early. Leave it out, set it to "
            "max_tokens - 1, or use the type 'adaptive'."
        )
        raise UnsupportedError(message, param="thinking.budget_tokens")
