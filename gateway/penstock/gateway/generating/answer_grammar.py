"""What a chat's answer has to be: calls of tools, JSON, or whatever else the request asks for."""

from __future__ import annotations

import msgspec

from penstock.engines.contract.messages import Grammar, Thought
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import UnsupportedError
from penstock.gateway.generating.tool_use import ToolUse
from penstock.gateway.llm.model_parsers import ModelParsers
from penstock.tokenizers import lark


def answer_grammar(asked: Grammar | None, use: ToolUse, parsers: ModelParsers, info: ModelInfo) -> Grammar | None:
    """`asked`: what the request's own fields say. Raises UnsupportedError for what a grammar cannot promise here."""
    strict = any(tool.strict for tool in use.tools)
    if not (use.is_forced or strict or asked):
        return None
    if not info.supports_grammars:
        param = "tool_choice" if use.is_forced else "tools" if strict else None
        raise UnsupportedError("This model's engine has no structured output.", param=param)
    if not use.tools:
        return asked
    parser = use.parser(parsers)
    form = None if parser is None else parser.form
    if form is None:
        message = (
            "This model's format of tool calls has no grammar: no strict tools, and no structured answer beside them."
        )
        raise UnsupportedError(message, param="tools")
    if use.is_forced:
        return Grammar("grammar", form.calls(use.tools, parsers.added_texts, parallel=use.in_parallel))
    if asked is None:
        return Grammar("grammar", form.calls_or_text(use.tools, parsers.added_texts, parallel=use.in_parallel))
    if asked.kind != "json_schema":
        raise UnsupportedError("Beside tools, the answer can be JSON or any text.", param="tools")
    answer = lark.json_value(msgspec.json.decode(asked.text))
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
