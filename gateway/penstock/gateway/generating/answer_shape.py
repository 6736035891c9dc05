"""What the answer of a chat consists of, and what it has to be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from penstock.engines.contract.messages import Grammar
from penstock.gateway.generating.answer_grammar import answer_grammar, behind_thought
from penstock.gateway.generating.answer_stages import answer_stages, check_tool_parser
from penstock.gateway.generating.thought_budget import AskedBudget, check_budget, within_budget
from penstock.gateway.generating.tool_use import ToolUse
from penstock.gateway.llm.dataplane import ChatPrompt, GenerateRequest, ServedModel
from penstock.gateway.llm.model_parsers import ModelParsers


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Known before the prompt is rendered, so that what cannot be done is refused before its cost is paid."""

    parsers: ModelParsers
    use: ToolUse
    grammar: Grammar | None
    show_reasoning: bool
    budget: AskedBudget | None

    def applied(self, wanted: GenerateRequest, prompt: ChatPrompt) -> GenerateRequest:
        """The request with its prompt, for an answer of this shape. Raises as `behind_thought`."""
        stages = answer_stages(self.parsers, self.use, prompt.end)
        grammar = self.grammar
        if grammar is not None:
            grammar = behind_thought(grammar, self.parsers, prompt.end)
        if self.budget is not None:
            grammar = within_budget(grammar, self.budget, self.parsers, prompt.end, calls=bool(self.use.tools))
        return replace(
            wanted,
            prompts=[prompt.token_ids],
            params=msgspec.structs.replace(wanted.params, grammar=grammar),
            grammar_field=wanted.grammar_field or ("tools" if self.use.tools else None),
            stages=stages,
            shown_tokens=self.parsers.shown_tokens if stages else frozenset[int](),
            show_reasoning=self.show_reasoning,
        )


def answer_shape(
    model: ServedModel,
    use: ToolUse,
    asked: Grammar | None,
    *,
    show_reasoning: bool,
    budget: AskedBudget | None = None,
) -> AnswerShape:
    """`asked`: what the request's own fields say that the answer is. Raises UnsupportedError for what this model's
    answers cannot be searched for, for what a grammar cannot promise here, and for a budget that nothing would keep."""
    check_tool_parser(model.parsers, use)
    if budget is not None:
        check_budget(budget, model.parsers, model.info)
    grammar = answer_grammar(asked, use, model.parsers, model.info)
    return AnswerShape(model.parsers, use, grammar, show_reasoning, budget)
