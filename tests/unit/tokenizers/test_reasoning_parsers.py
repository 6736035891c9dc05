"""What each parser of reasoning finds in what its models write."""

from __future__ import annotations

import pytest

from penstock.tokenizers import (
    ReasoningPart,
    StageChain,
    TextPart,
    find_reasoning_parser,
    find_tool_parser,
    reasoning_parser_names,
)
from support.parsers import Call, Found, found, pushed, reasoning_stage
from support.reasoning_examples import EXAMPLES

CASES = [(name, *example) for name, examples in EXAMPLES.items() for example in examples]


@pytest.mark.parametrize(("name", "prompt_end", "text", "expected"), CASES)
def test_an_example_is_parsed_the_same_at_once_and_by_characters(
    name: str, prompt_end: str, text: str, expected: Found
) -> None:
    assert found(pushed(reasoning_stage(name, prompt_end), [text])) == expected
    assert found(pushed(reasoning_stage(name, prompt_end), text)) == expected


def test_every_parser_has_examples() -> None:
    assert set(EXAMPLES) == set(reasoning_parser_names())


def test_thoughts_are_passed_on_as_they_come() -> None:
    stage = reasoning_stage("qwen3")
    assert stage.push("<think>\n") == []
    assert stage.push("Hm, < 3") == [ReasoningPart("Hm, < 3")]
    assert stage.push("</thi") == []
    assert stage.push("ng></think>\n") == [ReasoningPart("</thing>")]
    assert stage.push("\n4") == [TextPart("4")]


def test_markers_are_what_must_stay_visible() -> None:
    assert find_reasoning_parser("qwen3").markers == ("<think>", "</think>")
    assert find_reasoning_parser("gemma4").markers == ("<|channel>", "<channel|>")
    assert "<|return|>" in find_reasoning_parser("gpt_oss").markers


@pytest.mark.parametrize(
    ("reasoning", "tools", "text"),
    [
        ("qwen3", "hermes", '<think>\nHm.</think>\n\nYes.<tool_call>{"name": "clock"}</tool_call>'),
        (
            "gpt_oss",
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Yes.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>",
        ),
    ],
)
def test_a_tool_parser_behind_one_of_reasoning(reasoning: str, tools: str, text: str) -> None:
    factories = (find_reasoning_parser(reasoning)(), find_tool_parser(tools)(()))
    expected = Found("Yes.", [Call("clock", "{}")], "Hm.")
    assert found(pushed(StageChain(factories), [text])) == expected
    assert found(pushed(StageChain(factories), text)) == expected
