"""What each parser of tool calls finds in what its models write."""

from __future__ import annotations

import json

import pytest

from penstock.tokenizers import TextPart, Tool, ToolCallPart, find_tool_parser, tool_parser_names
from penstock.tokenizers.tool_calls import ToolCallStage
from support.parsers import TOOLS, Found, found, pushed, tool_stage
from support.tool_call_examples import EXAMPLES

CASES = [(name, text, expected) for name, examples in EXAMPLES.items() for text, expected in examples]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_an_example_is_parsed_the_same_at_once_and_by_characters(name: str, text: str, expected: Found) -> None:
    assert found(pushed(tool_stage(name), [text])) == expected
    assert found(pushed(tool_stage(name), text)) == expected


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v31", "kimi_k2", "glm45", "mistral", "granite"])
def test_a_closing_that_is_cut_off_is_no_text(name: str) -> None:
    """However many of the last tokens are missing: behind the last argument there is nothing but a call."""
    text, expected = EXAMPLES[name][0]
    last = expected.calls[-1]
    for end in range(len(text), 0, -1):
        cut = found(pushed(tool_stage(name), [text[:end]]))
        if not cut.calls or cut.calls[-1].arguments != last.arguments:
            break
        assert cut.text == expected.text


@pytest.mark.parametrize("name", EXAMPLES)
def test_complete_calls_have_arguments_that_are_json(name: str) -> None:
    text, expected = EXAMPLES[name][0]
    assert expected.calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in found(pushed(tool_stage(name), [text])).calls)


def test_every_format_has_examples() -> None:
    stages = {find_tool_parser(name)(TOOLS)().__class__ for name in EXAMPLES}
    assert stages == {tool_stage(name).__class__ for name in tool_parser_names()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_says_where_its_format_comes_from(name: str) -> None:
    assert "The format" in (tool_stage(name).__doc__ or "")


def test_markers_are_what_must_stay_visible() -> None:
    assert "<|tool_call_argument_begin|>" in find_tool_parser("kimi_k2").markers
    assert "<｜tool▁sep｜>" in find_tool_parser("deepseek_v3").markers
    assert {"<|channel|>", "<|message|>", "<|call|>"} <= set(find_tool_parser("gpt_oss").markers)
    assert find_tool_parser("hermes").markers == ("<tool_call>", "</tool_call>")


def test_json_arguments_are_passed_on_as_they_come() -> None:
    stage = tool_stage("hermes")
    assert stage.push('a <tool_call>{"name": "weather"') == [TextPart("a "), ToolCallPart(0, name="weather")]
    assert stage.push(', "arguments": {"city": "O') == [ToolCallPart(0, '{"city": "O')]
    assert stage.push('slo"') == [ToolCallPart(0, 'slo"')]
    assert stage.push("}}</tool") == [ToolCallPart(0, "}")]
    assert stage.push("_call>") == []


def test_what_was_passed_on_is_not_kept() -> None:
    stage = tool_stage("hermes")
    assert isinstance(stage, ToolCallStage)
    stage.push('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"')
    assert stage.reader.recorded() == ""


def test_a_bare_object_is_held_back_only_while_it_may_be_a_call() -> None:
    assert tool_stage("llama3_json").push('{"na') == []
    assert tool_stage("llama3_json").push('{"answer"') == [TextPart('{"answer"')]
    assert tool_stage("llama3_json").push('{"name": "Oslo"') == [TextPart('{"name": "Oslo"')]
    assert tool_stage("llama3_json", []).push('{"name": "clock"') == [TextPart('{"name": "clock"')]


def test_strings_between_tags_are_passed_on_as_they_come() -> None:
    stage = tool_stage("qwen3_coder")
    assert stage.push("<tool_call><function=weather>") == [ToolCallPart(0, name="weather")]
    assert stage.push("<parameter=city>\nO") == [ToolCallPart(0, '{"city": "O')]
    assert stage.push('s"lo\n') == [ToolCallPart(0, 's\\"lo')]
    assert stage.push("</parameter>") == [ToolCallPart(0, '"')]
    assert stage.push("<parameter=days>1") == []
    assert stage.push("2</parameter></function>") == [ToolCallPart(0, ', "days": 12}')]


def test_a_name_that_does_not_end_is_not_waited_for() -> None:
    text = '<tool_call>{"name": "' + 1000 * "x"
    assert "".join(part.text for part in tool_stage("hermes").push(text) if isinstance(part, TextPart)) == text


def test_a_tool_whose_schema_is_broken_is_called_all_the_same() -> None:
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    for parameters in ({}, {"properties": []}, {"properties": {"a": 3}}, {"properties": {"a": {"type": {}}}}):
        calls = found(pushed(tool_stage("glm45", [Tool("f", parameters)]), [text])).calls
        assert [call.arguments for call in calls] == ['{"a": 1}']
