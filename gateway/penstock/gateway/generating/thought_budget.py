"""How long a model may think, as far as a request says so."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.engines.contract.messages import Grammar, ThoughtBudget
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.generating.answer_stages import check_reasoning_parser
from penstock.gateway.llm.model_parsers import ModelParsers

_ANY_TEXT = Grammar("text", "")


@dataclass(frozen=True, slots=True)
class AskedBudget:
    tokens: int
    param: str
    """The field that says so."""


def asked_budget(*given: tuple[str, int | None], max_tokens: int) -> AskedBudget | None:
    """Of a request's fields, each with its value; `max_tokens` 0: what the context leaves. None: no bound, or one that
    `max_tokens` keeps by itself. Raises InvalidRequestError."""
    budgets = [AskedBudget(tokens, param) for param, tokens in given if tokens is not None]
    for budget in budgets:
        if budget.tokens < 0:
            raise InvalidRequestError(f"{budget.param} must not be negative.", param=budget.param)
        if budget.tokens != budgets[0].tokens:
            raise InvalidRequestError(f"{budgets[0].param} and {budget.param} are not the same.", param=budget.param)
    if not budgets or (max_tokens and budgets[0].tokens >= max_tokens - 1):
        return None
    return budgets[0]


def check_budget(budget: AskedBudget, parsers: ModelParsers, info: ModelInfo) -> None:
    """Raises UnsupportedError where nothing could keep it."""
    check_reasoning_parser(parsers, budget.param)
    if parsers.reasoning is not None and parsers.reasoning.frame is None:
        message = f"{budget.param}: this model's parser of reasoning does not say where an answer begins."
        raise UnsupportedError(message, param=budget.param)
    if not info.supports_grammars:
        raise UnsupportedError(f"{budget.param}: this model's engine cannot end a thought.", param=budget.param)


def within_budget(
    grammar: Grammar | None, budget: AskedBudget, parsers: ModelParsers, prompt_end: str, *, calls: bool
) -> Grammar | None:
    """The grammar with the bound, for a model that `check_budget` lets pass. `calls`: the answer may have calls of
    tools, which have a beginning of their own."""
    if parsers.reasoning is None or parsers.reasoning.frame is None:
        return grammar
    frame = parsers.reasoning.frame(prompt_end)
    tags = frame.thought_tags
    if tags is None:
        return grammar
    closing = tags.closing if calls else tags.closing + frame.preface
    bound = ThoughtBudget(budget.tokens, tags.openings, tags.endings, closing, tags.inside, tags.again)
    return msgspec.structs.replace(grammar or _ANY_TEXT, budget=bound)
