"""Whether and how hard the model is to think, as chat templates are told."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.anthropic.schemas import OutputConfig, Thinking
from penstock.gateway.generating.answer_stages import check_reasoning_parser
from penstock.gateway.generating.thought_budget import AskedBudget, asked_budget
from penstock.gateway.llm.model_parsers import ModelParsers

ENABLED = {"enabled": True, "adaptive": True, "disabled": False}


def template_kwargs(thinking: Thinking | None, output: OutputConfig | None, parsers: ModelParsers) -> dict[str, Any]:
    """Effort is only a hint, so that a model which does not think may answer, too. Raises InvalidRequestError,
    UnsupportedError."""
    kwargs: dict[str, Any] = {}
    if thinking is not None:
        if thinking.type not in ENABLED:
            raise InvalidRequestError("thinking.type must be enabled, adaptive or disabled.", param="thinking.type")
        if thinking.type == "enabled":
            check_reasoning_parser(parsers, "thinking")
        kwargs["enable_thinking"] = ENABLED[thinking.type]
    if output is not None and output.effort is not None and parsers.reasoning is not None:
        kwargs["reasoning_effort"] = output.effort
    return kwargs


def thinking_budget(thinking: Thinking | None, max_tokens: int | None) -> AskedBudget | None:
    """`max_tokens` None: not known, since nothing is to be generated. Raises InvalidRequestError."""
    name = "thinking.budget_tokens"
    if thinking is None or thinking.budget_tokens is None:
        return None
    if thinking.type != "enabled":
        raise InvalidRequestError(f"{name} needs thinking.type to be enabled.", param=name)
    if thinking.budget_tokens < 1:
        raise InvalidRequestError(f"{name} must be at least 1.", param=name)
    if max_tokens is not None and thinking.budget_tokens >= max_tokens:
        raise InvalidRequestError(f"{name} must be less than max_tokens.", param=name)
    return asked_budget((name, thinking.budget_tokens), max_tokens=max_tokens or 0)
