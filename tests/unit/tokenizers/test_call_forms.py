"""What a grammar makes a model write, the parser of the same format has to read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers_grammars import BlindWriter
from penstock.tokenizers import (
    JSON_LIST_OF_CALLS,
    Part,
    StageChain,
    TextPart,
    Tool,
    ToolCallPart,
    ToolParser,
    find_tool_parser,
    lark,
    tool_parser_names,
)

PARSERS = {name: find_tool_parser(name) for name in tool_parser_names()} | {"json-list": JSON_LIST_OF_CALLS}
WITH_FORM = {name: parser for name, parser in PARSERS.items() if parser.form}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    Tool("weather", SCHEMA, True),
    Tool("time", {"type": "object", "properties": {}, "additionalProperties": False}, True),
]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> BlindWriter:
    return BlindWriter(tmp_path_factory.mktemp("model"))


def read(parser: ToolParser, text: str) -> tuple[list[tuple[str, Any]], str]:
    """Calls and text."""
    chain = StageChain([parser(TOOLS)])
    parts: list[Part] = [*chain.push(text), *chain.flush()]
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCallPart):
            if part.index == len(calls):
                calls.append((part.name or "", ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return (
        [(name, json.loads(arguments)) for name, arguments in calls],
        "".join(part.text for part in parts if isinstance(part, TextPart)),
    )


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        if name == "weather":
            assert list(arguments) == ["city", "days"]
            assert arguments["city"] in ("Bern", "Köln")
            assert arguments["days"] in range(1, 10)
        else:
            assert (name, arguments) == ("time", {})


def test_which_formats_have_a_form() -> None:
    assert set(WITH_FORM) >= {"hermes", "qwen3", "granite", "llama3_json", "mistral", "phi4_mini_json", "json-list"}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", WITH_FORM)
def test_forced_calls(writer: BlindWriter, name: str, parallel: bool) -> None:
    parser = WITH_FORM[name]
    assert parser.form is not None
    grammar = parser.form.calls(TOOLS, {}, parallel=parallel)
    counts = set()
    for seed in range(6):
        text = writer.write("grammar", grammar, seed)
        calls, rest = read(parser, text)
        assert rest.strip() == "", text
        assert calls, text
        check(calls)
        counts.add(len(calls))
    assert (max(counts) > 1) == parallel


@pytest.mark.parametrize("name", WITH_FORM)
def test_calls_or_an_answer(writer: BlindWriter, name: str) -> None:
    parser = WITH_FORM[name]
    assert parser.form is not None
    answer = lark.json_value({"enum": ["yes", "no"]})
    grammar = parser.form.calls_or(answer, TOOLS, {}, parallel=False)
    kinds = set()
    for seed in range(12):
        text = writer.write("grammar", grammar, seed)
        calls, rest = read(parser, text)
        assert len(calls) + (rest.strip() in ('"yes"', '"no"')) == 1, text
        check(calls)
        kinds.add(len(calls))
    assert kinds == {0, 1}


@pytest.mark.parametrize("name", WITH_FORM)
def test_calls_or_text(writer: BlindWriter, name: str) -> None:
    parser = WITH_FORM[name]
    assert parser.form is not None
    grammar = parser.form.calls_or_text(TOOLS, {}, parallel=True)
    call = writer.write("grammar", parser.form.calls(TOOLS[:1], {}, parallel=False), seed=1)
    assert writer.takes("grammar", grammar, call)
    assert writer.takes("grammar", grammar, "Any text, with <signs> and <b>tags</b>.")
    assert not writer.takes("grammar", grammar, call.replace('"city"', '"town"'))
    assert not writer.takes("grammar", grammar, call.replace('"weather"', '"wetter"'))
