"""Whether and how hard the model is to think, as chat templates are told. How long it may is a constraint where it
thinks; all else is a hint."""

from __future__ import annotations

from typing import Any

from penstock.gateway.anthropic.schemas import OutputConfig, Thinking
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.answer_shape import AskedBudget, asked_budget
from penstock.gateway.llm.model_parsers import ModelParsers

ENABLED = {"enabled": True, "adaptive": True, "disabled": False}
_BUDGET = "thinking.budget_tokens"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_DISPLAYS = (None, "summarized", "omitted")
_NOT_SHOWN = "this model's chat template shows no reasoning (--reasoning-parser)."


def template_kwargs(
    thinking: Thinking | None, output: OutputConfig | None, parsers: ModelParsers, context: RequestContext
) -> dict[str, Any]:
    """A model that does not think may answer, too."""
    kwargs: dict[str, Any] = {}
    if thinking is not None:
        check_thinking(thinking, context)
        if thinking.type == "enabled" and parsers.reasoning is None:
            context.ignore("thinking", _NOT_SHOWN)
        elif thinking.type in ENABLED:
            kwargs["enable_thinking"] = ENABLED[thinking.type]
    effort = asked_effort(output, context)
    if effort is not None and parsers.reasoning is not None:
        kwargs["reasoning_effort"] = effort
    elif effort is not None:
        context.ignore("output_config.effort", _NOT_SHOWN)
    return kwargs


def check_thinking(thinking: Thinking, context: RequestContext) -> None:
    """Notes values that this server does not know."""
    if thinking.type not in ENABLED:
        context.ignore("thinking.type", "it is enabled, adaptive or disabled.")
    if thinking.display not in _DISPLAYS:
        context.ignore("thinking.display", "it is summarized or omitted.")


def asked_effort(output: OutputConfig | None, context: RequestContext) -> str | None:
    """None, too, for one that this server does not know, which is noted."""
    effort = None if output is None else output.effort
    if effort is None or (isinstance(effort, str) and effort in _EFFORTS):
        return effort
    context.ignore("output_config.effort", f"it is one of {', '.join(_EFFORTS)}.")
    return None


def shows_thoughts(thinking: Thinking | None) -> bool:
    return thinking is None or thinking.display != "omitted"


def thinking_budget(
    thinking: Thinking | None, max_tokens: int, context: RequestContext, parsers: ModelParsers | None = None
) -> AskedBudget | None:
    """None: no bound, one that `max_tokens` keeps by itself, or one for a model that does not think. `parsers` None:
    another server's model, which may. Raises InvalidRequestError."""
    if thinking is None or thinking.budget_tokens is None:
        return None
    if parsers is not None and parsers.reasoning is None:
        context.ignore(_BUDGET, _NOT_SHOWN)
        return None
    if thinking.type == "disabled":
        context.ignore(_BUDGET, "there is no thought to bound.")
        return None
    return asked_budget((_BUDGET, thinking.budget_tokens), max_tokens=max_tokens)
