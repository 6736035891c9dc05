"""Detection of the parsers that a model needs, from its chat template's source."""

from __future__ import annotations

_TOOL_PARSERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("gemma", ("<start_function_call>",)),
    ("gemma", ("<|tool_call>",)),
    ("llama4_pythonic", ("func_name1(", "<|header_start|>")),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary',)),
    ("granite", ("<|start_of_role|>", "tool_call")),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("phi4_mini_json", ("functools[",)),
    ("hermes", ("<tool_call>",)),
)
"""What a template must contain, all of it. The first row that fits counts: those below are less particular."""

_REASONING_PARSERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("granite", ("Here is my thought process:",)),
    ("gemma4", ("<|channel>",)),
    ("mistral", ("[THINK]",)),
    ("minimax", ("<minimax:tool_call>", "<think>")),
    ("glm45", ("[gMASK]", "<think>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("<|im_start|>", "<think>")),
    ("think", ("<think>",)),
)


def detect_tool_parser(template: str) -> str | None:
    """The name for `find_tool_parser`. None if the template shows no format of calls that Penstock knows."""
    return _first(_TOOL_PARSERS, template)


def detect_reasoning_parser(template: str) -> str | None:
    """The name for `find_reasoning_parser`. None if the template shows no reasoning."""
    return _first(_REASONING_PARSERS, template)


def _first(table: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    return next((name for name, needed in table if all(text in template for text in needed)), None)
