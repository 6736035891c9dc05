"""The parsers that a chat template's source names without knowing it."""

from __future__ import annotations

import pytest

from penstock.tokenizers import (
    detect_reasoning_parser,
    detect_tool_parser,
    find_reasoning_parser,
    find_tool_parser,
)

EXCERPTS: list[tuple[str, str | None, str | None]] = [
    ("{{ '<|im_start|>' + role }}\nwithin <tool_call></tool_call> XML tags", "hermes", None),
    ("<|im_start|>assistant\n<think>\n\n</think> {% if tools %}<tool_call>", "hermes", "qwen3"),
    ("<|im_start|>\n<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", None),
    ("<|im_start|>\n<think>\n<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", "qwen3"),
    ("{{ '<｜Assistant｜>' }}{% if '</think>' in content %}", None, "deepseek_r1"),
    (
        "'<｜Assistant｜>' '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
        "deepseek_v3",
        None,
    ),
    (
        "'<｜Assistant｜>' '</think>' '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments",
        "deepseek_v31",
        "deepseek_r1",
    ),
    ("<|im_assistant|><|tool_calls_section_begin|><|tool_call_begin|>{{ id }}", "kimi_k2", None),
    ("<|im_assistant|><think></think><|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "kimi_k2"),
    ("[gMASK]<sop><think></think><tool_call>{{ name }}\n<arg_key>", "glm45", "glm45"),
    ("]~b]ai\n<think>\n<minimax:tool_call>\n<invoke name=", "minimax_m2", "minimax"),
    ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
    ("[THINK]{{ thinking }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]", "mistral", "mistral"),
    ("<start_of_turn>model\n<start_function_call>call:", "gemma", None),
    ("<|turn>model\n<|channel>thought\n<channel|><|tool_call>call:", "gemma", "gemma4"),
    ("<|start_header_id|>ipython<|end_header_id|> {{ '<|python_tag|>' }}", "llama3_json", None),
    (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        "llama3_json",
        None,
    ),
    ("<|header_start|>assistant [func_name1(params_name1=params_value1)]", "llama4_pythonic", None),
    ("<|start_header_id|> [func_name1(params_name1=params_value1)]", "pythonic", None),
    ("<|start_of_role|>assistant_tool_call<|end_of_role|><|tool_call|>", "granite", None),
    ("<|start_of_role|> Here is my thought process: Here is my response: <|tool_call|>", "granite", "granite"),
    ("<|system|>{{ content }}<|tool|>{{ tools }}<|/tool|><|end|>", "phi4_mini_json", None),
    ("<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|>", "gpt_oss", "gpt_oss"),
    ("{{ bos_token }}<think>{{ reasoning }}</think>", None, "think"),
    ("{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), EXCERPTS)
def test_a_template_shows_which_parsers_it_needs(template: str, tools: str | None, reasoning: str | None) -> None:
    assert detect_tool_parser(template) == tools
    assert detect_reasoning_parser(template) == reasoning


def test_what_is_detected_exists() -> None:
    assert all(find_tool_parser(tools) for _, tools, _ in EXCERPTS if tools)
    assert all(find_reasoning_parser(reasoning) for _, _, reasoning in EXCERPTS if reasoning)
