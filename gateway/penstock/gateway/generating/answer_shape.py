"""The shape of a chat's answer: the tools that it may call, the parts that it consists of, the grammar that it follows,
and the bound of its thought."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from penstock.engines.contract.messages import Grammar, Thought, ThoughtBudget
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.models.language.dataplane import ChatPrompt, GenerateRequest, ServedModel
from penstock.gateway.models.language.models import ModelParsers
from penstock.tokenizers import (
    JSON_LIST_OF_CALLS,
    OutputStage,
    Part,
    StageFactory,
    TextPart,
    Tool,
    ToolCallPart,
    ToolParser,
    lark,
)

_ANY_TEXT = Grammar("text", "")


@dataclass(frozen=True, slots=True)
class AskedBudget:
    tokens: int
    param: str
    """The field that says so."""


def asked_budget(*limits: tuple[str, int | None], max_tokens: int) -> AskedBudget | None:
    """Of a request's fields, each with its value; `max_tokens` 0: what the context leaves. None: no bound, or one that
    `max_tokens` keeps by itself. Raises InvalidRequestError."""
    budgets = [AskedBudget(tokens, param) for param, tokens in limits if tokens is not None]
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


def answer_grammar(
    request_grammar: Grammar | None, use: ToolUse, parsers: ModelParsers, info: ModelInfo
) -> Grammar | None:
    """`request_grammar`: what the request's own fields say. Raises UnsupportedError for what a grammar cannot
    promise here."""
    strict = any(tool.strict for tool in use.tools)
    if not (use.is_forced or strict or request_grammar):
        return None
    if not info.supports_grammars:
        param = "tool_choice" if use.is_forced else "tools" if strict else None
        raise UnsupportedError("This model's engine has no structured output.", param=param)
    if not use.tools:
        return request_grammar
    parser = use.parser(parsers)
    form = None if parser is None else parser.form
    if form is None:
        message = (
            "This model's format of tool calls has no grammar: no strict tools, and no structured answer beside them."
        )
        raise UnsupportedError(message, param="tools")
    if use.is_forced:
        return Grammar("grammar", form.calls(use.tools, parsers.added_texts, parallel=use.in_parallel))
    if request_grammar is None:
        return Grammar("grammar", form.calls_or_text(use.tools, parsers.added_texts, parallel=use.in_parallel))
    if request_grammar.kind != "json_schema":
        raise UnsupportedError("Beside tools, the answer can be JSON or any text.", param="tools")
    answer = lark.json_value(msgspec.json.decode(request_grammar.text))
    return Grammar("grammar", form.calls_or(answer, use.tools, parsers.added_texts, parallel=use.in_parallel))


def behind_thought(grammar: Grammar, parsers: ModelParsers, prompt_end: str) -> Grammar:
    """The same for the answer alone, where the model may think before it. `prompt_end` is that of the rendered prompt.
    Raises UnsupportedError for a parser that cannot tell thoughts from answers in advance."""
    if parsers.reasoning is None:
        return grammar
    if parsers.reasoning.frame is None:
        message = "This model's parser of reasoning does not say where an answer begins."
        raise UnsupportedError(message)
    frame = parsers.reasoning.frame(prompt_end)
    thought = None if frame.thought is None else Thought(*frame.thought)
    return msgspec.structs.replace(grammar, thought=thought, preface=frame.preface)


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


MALFORMED = "malformed_arguments"
"""Shown to the model as the only argument of an earlier call whose arguments are no object: chat templates need one."""
_MAX_NAME = 256
"""What parsers read: `json_text.LONGEST_NAME`."""
_NOT_IN_NAMES = re.compile(r"""[\s<>{}\[\]()"'`,;=|｜\\]""")
"""What parsers take for the end of a name, and what would have to be escaped in a call."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: Sequence[Tool] = ()
    """What the model may call."""
    is_forced: bool = False
    """It calls at least one of them, and writes nothing else."""
    is_named: bool = False
    """The request itself has named the one to call."""
    in_parallel: bool = True
    """Whether an answer may have more than one call."""
    shown: Sequence[Mapping[str, Any]] = ()
    """All tools of the request as functions, for chat templates. Nothing there where the API has another way."""

    def parser(self, parsers: ModelParsers) -> ToolParser | None:
        """What reads the calls of this answer. Forced calls need a form that a grammar can write; any model can write
        a JSON list."""
        if self.is_forced and (parsers.tools is None or parsers.tools.form is None):
            return JSON_LIST_OF_CALLS
        return parsers.tools


NO_TOOLS = ToolUse()


def check_arguments_schema(schema: Mapping[str, Any] | None, where: str) -> None:
    """Arguments of calls are objects. Raises InvalidRequestError; `where` is the caller's field."""
    kind = "object" if schema is None else schema.get("type", "object")
    if kind not in ("object", ["object"]):
        raise InvalidRequestError(f"{where}: the schema's type must be object.", param=where)


def check_tool_name(name: str, where: str) -> None:
    """Any script; nothing that could be taken for the end of a name. Raises InvalidRequestError; `where`
    is the caller's field."""
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable() or _NOT_IN_NAMES.search(name):
        message = (
            f"{where}: a tool's name must have 1 to {_MAX_NAME} characters, without white space, quotes, brackets and "
            "control characters."
        )
        raise InvalidRequestError(message, param=where)


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Known before the prompt is rendered, so that what cannot be done is refused before its cost is paid."""

    parsers: ModelParsers
    use: ToolUse
    grammar: Grammar | None
    show_reasoning: bool
    budget: AskedBudget | None

    def applied(self, request: GenerateRequest, prompt: ChatPrompt) -> GenerateRequest:
        """The request with its prompt, for an answer of this shape. Raises as `behind_thought`."""
        stages = answer_stages(self.parsers, self.use, prompt.end)
        grammar = self.grammar
        if grammar is not None:
            grammar = behind_thought(grammar, self.parsers, prompt.end)
        if self.budget is not None:
            grammar = within_budget(grammar, self.budget, self.parsers, prompt.end, calls=bool(self.use.tools))
        return replace(
            request,
            prompts=[prompt.token_ids],
            images=prompt.images,
            params=msgspec.structs.replace(request.params, grammar=grammar),
            grammar_field=request.grammar_field or ("tools" if self.use.tools else None),
            stages=stages,
            shown_tokens=self.parsers.shown_tokens if stages else frozenset[int](),
            show_reasoning=self.show_reasoning,
        )


def answer_shape(
    model: ServedModel,
    use: ToolUse,
    request_grammar: Grammar | None,
    *,
    show_reasoning: bool,
    budget: AskedBudget | None = None,
) -> AnswerShape:
    """`request_grammar`: what the request's own fields say that the answer is. Raises UnsupportedError for what this
    model's answers cannot be searched for, for what a grammar cannot promise here, and for a budget that nothing would
    keep."""
    check_tool_parser(model.parsers, use)
    if budget is not None:
        check_budget(budget, model.parsers, model.info)
    grammar = answer_grammar(request_grammar, use, model.parsers, model.info)
    return AnswerShape(model.parsers, use, grammar, show_reasoning, budget)
