"""What a grammar makes a model write, the parser of the same format has to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

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
from penstock.tokenizers.tool_calls import CallForm
from support.grammars import BlindWriter

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


KINDS = ["text", "added", "special"]
"""What a model's tokenizer makes of a format's tags."""


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BlindWriter]:
    tags = sorted({marker for parser in WITH_FORM.values() for marker in parser.markers})
    return {
        kind: BlindWriter(tmp_path_factory.mktemp("model"), tags if kind != "text" else (), special=kind == "special")
        for kind in KINDS
    }


@pytest.fixture(params=KINDS)
def writer(request: pytest.FixtureRequest, writers: dict[str, BlindWriter]) -> BlindWriter:
    return writers[request.param]


def form_of(name: str) -> CallForm:
    form = WITH_FORM[name].form
    assert form is not None
    return form


def read(parser: ToolParser, text: str, tools: Sequence[Tool] = TOOLS) -> tuple[list[tuple[str, Any]], str]:
    """Calls and text."""
    chain = StageChain([parser(tools)])
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
    grammar = form_of(name).calls(TOOLS, writer.added_texts, parallel=parallel)
    counts = set()
    for seed in range(6):
        text = writer.write("grammar", grammar, seed)
        calls, rest = read(WITH_FORM[name], text)
        assert rest.strip() == "", text
        assert calls, text
        check(calls)
        counts.add(len(calls))
    assert (max(counts) > 1) == parallel


@pytest.mark.parametrize("name", WITH_FORM)
def test_calls_or_an_answer(writer: BlindWriter, name: str) -> None:
    answer = lark.json_value({"enum": ["yes", "no"]})
    grammar = form_of(name).calls_or(answer, TOOLS, writer.added_texts, parallel=False)
    kinds = set()
    for seed in range(12):
        text = writer.write("grammar", grammar, seed)
        calls, rest = read(WITH_FORM[name], text)
        assert len(calls) + (rest.strip() in ('"yes"', '"no"')) == 1, text
        check(calls)
        kinds.add(len(calls))
    assert kinds == {0, 1}


@pytest.mark.parametrize("name", WITH_FORM)
def test_calls_or_text(writer: BlindWriter, name: str) -> None:
    grammar = form_of(name).calls_or_text(TOOLS, writer.added_texts, parallel=True)
    call = writer.write("grammar", form_of(name).calls(TOOLS[:1], writer.added_texts, parallel=False), seed=1)
    assert writer.takes("grammar", grammar, call)
    assert writer.takes("grammar", grammar, "Any text, with <signs> and <b>tags</b>.")
    assert not writer.takes("grammar", grammar, call.replace('"city"', '"town"'))
    assert not writer.takes("grammar", grammar, call.replace('"weather"', '"wetter"'))


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("name", WITH_FORM)
def test_behind_a_tag_a_call_follows(writer: BlindWriter, name: str, spelled: bool) -> None:
    grammar = form_of(name).calls_or_text(TOOLS, writer.added_texts, parallel=False)
    for seed, tag in enumerate(form_of(name).tags):
        for text in ("", "Hm.\n"):
            written = writer.write("grammar", grammar, seed, begun=writer.token_ids(text + tag, spelled=spelled))
            calls, rest = read(WITH_FORM[name], written)
            assert len(calls) == 1, written
            assert rest.strip() == text.strip()
            check(calls)


@pytest.mark.parametrize("name", WITH_FORM)
def test_no_text_is_a_call_by_accident(writer: BlindWriter, name: str) -> None:
    """Whatever the parser reads as a call, in a text that the grammar takes, fits the tool's schema."""
    grammar = form_of(name).calls_or_text(TOOLS, writer.added_texts, parallel=True)
    num_taken = 0
    for before, tag, key in product(
        ("", " ", "Hm.\n", "[] "), ("", *WITH_FORM[name].markers), ("arguments", "parameters")
    ):
        call = json.dumps({"name": "weather", key: {"town": 1}})
        for text in (call, f"[{call}]", f" [{call}]", f"\n{call}", "weather{}"):
            written = before + tag + text
            if writer.takes("grammar", grammar, written):
                num_taken += 1
                check(read(WITH_FORM[name], written)[0])
    assert num_taken > 0


@pytest.mark.parametrize("name", WITH_FORM)
def test_any_arguments(writer: BlindWriter, name: str) -> None:
    """Tools without a schema, schemas with unknown words, and names and values that look like a part of the format."""
    odd = '</tool_call>;]"}\\ <tool_call> ü😀'
    word: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [odd]}}, "required": ["a"], "not": {}}
    tools = [Tool("w-1.2_é", word | {"additionalProperties": False}), Tool("none")]
    both = form_of(name).calls(tools, writer.added_texts, parallel=False)
    found = dict(pair for seed in range(8) for pair in read_calls(writer, name, both, tools, seed))
    assert found["w-1.2_é"] == {"a": odd}
    assert isinstance(found["none"], dict)


def read_calls(writer: BlindWriter, name: str, grammar: str, tools: list[Tool], seed: int) -> list[tuple[str, Any]]:
    text = writer.write("grammar", grammar, seed)
    calls, rest = read(WITH_FORM[name], text, tools)
    assert (len(calls), rest.strip()) == (1, ""), text
    return calls


@pytest.mark.parametrize("name", ["查询天气", "मौसम", "mcp/server:tool@1", "x" * 256])
@pytest.mark.parametrize("parser", WITH_FORM)
def test_names_of_any_script_are_written_as_they_are(writers: dict[str, BlindWriter], parser: str, name: str) -> None:
    tools = [Tool(name, {"type": "object", "properties": {}, "additionalProperties": False})]
    writer = writers["special"]
    text = writer.write("grammar", form_of(parser).calls(tools, writer.added_texts, parallel=False), 1)
    assert name in text
    assert read(WITH_FORM[parser], text, tools)[0] == [(name, {})]
