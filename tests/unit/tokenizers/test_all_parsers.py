"""What holds for every parser, whatever a model writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenizers import OutputStage, reasoning_parser_names, tool_parser_names
from penstock.tokenizers.parsing import ParserStage, Reader
from support.parsers import found, pushed, reasoning_stage, tool_stage
from support.reasoning_examples import EXAMPLES as REASONING
from support.stages import joined
from support.tool_call_examples import EXAMPLES as TOOL_CALLS

Make = Callable[[], OutputStage]
STAGES: dict[str, Make] = {
    **{f"tools {name}": lambda name=name: tool_stage(name) for name in tool_parser_names()},
    **{f"reasoning {name}": lambda name=name: reasoning_stage(name) for name in reasoning_parser_names()},
    **{f"reasoning {name} inside": lambda name=name: reasoning_stage(name, "<think>") for name in ("qwen3", "think")},
}
TEXTS = [text for examples in TOOL_CALLS.values() for text, _ in examples]
TEXTS += [text for examples in REASONING.values() for _, text, _ in examples]
MARKERS = sorted({marker for make in STAGES.values() for marker in make().markers})
FRAGMENTS = [
    *MARKERS,
    *('{"name": "clock"', ', "arguments": {', '"parameters": ', "}", "]", ";", '"', "\\", "\\u12", "'", "[clock(", ")"),
    *(
        "city",
        "=",
        "call:",
        ":",
        ",",
        "clock",
        ">",
        " ",
        "\n",
        "```json\n",
        "Here is my response:",
        "to=functions.f",
        "ö",
    ),
]
WITHOUT_MARKERS = "abcxyö015.,\n"

markup = st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join)
damaged = st.tuples(st.sampled_from(TEXTS), st.integers(0, 200), st.integers(0, 10)).map(
    lambda given: given[0][: given[1]] + given[0][given[1] + given[2] :]
)
texts = st.one_of(markup, damaged, st.tuples(damaged, markup).map("".join), st.text())


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(STAGES)), text=texts, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_parts_do_not_depend_on_how_the_text_is_cut(name: str, text: str, cuts: list[int]) -> None:
    make = STAGES[name]
    whole = pushed(make(), [text])
    ends = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[start:end] for start, end in pairwise(ends)]
    assert joined(pushed(make(), pieces)) == joined(whole)
    assert joined(pushed(make(), text)) == joined(whole)
    everything = found(whole)
    str(everything).encode()


@given(name=st.sampled_from(sorted(STAGES)), pieces=st.lists(st.text(WITHOUT_MARKERS, min_size=1), max_size=5))
def test_text_without_markup_passes_at_once(name: str, pieces: list[str]) -> None:
    stage = STAGES[name]()
    for piece in pieces:
        everything = found(stage.push(piece))
        assert everything.text + everything.reasoning == piece
    assert not stage.flush()


LONG = {
    "text": "abcdefgh ",
    "beginnings of tags": "<｜<|<tool_call<th[TOOL_C",
    "a call": '<tool_call>{"name": "clock", "arguments": {"a": "' + "b" * 500 + '\\"[{"}}</tool_call>',
    "tags": "".join(MARKERS),
}


@pytest.mark.parametrize("name", sorted(STAGES))
@pytest.mark.parametrize("kind", LONG)
def test_what_waits_to_be_read_is_never_longer_than_a_tag(name: str, kind: str) -> None:
    """So the work for each new piece does not grow with the text."""
    stage = STAGES[name]()
    assert isinstance(stage, ParserStage)
    text = LONG[kind] * (3_000 // len(LONG[kind]))
    longest = 0
    for char in text:
        stage.push(char)
        longest = max(longest, len(stage.reader.rest()))
    assert longest <= max(len(marker) for marker in (*stage.markers, "Here is my thought process:"))


UNENDING = {
    "hermes": '<tool_call>{"name": "clock", "arguments": {"a": "',
    "llama3_json": '{"parameters": {"a": "',
    "pythonic": "[clock(a='",
    "qwen3_coder": "<tool_call><function=weather><parameter=days>",
    "glm45": "<tool_call>weather<arg_key>city</arg_key><arg_value>",
    "gemma": '<|tool_call>call:clock{a:<|"|>',
}


@pytest.mark.parametrize("name", UNENDING)
def test_the_work_is_linear_in_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the characters that the parser is given each time something arrives, in 20,000 pieces."""
    looked_at = 0
    feed = Reader.feed

    def counted(reader: Reader, text: str) -> None:
        nonlocal looked_at
        feed(reader, text)
        looked_at += len(reader._text)

    monkeypatch.setattr(Reader, "feed", counted)
    text = UNENDING[name] + 20_000 * "x"
    parts = pushed(tool_stage(name), text)
    assert len(text) <= looked_at < 3 * len(text)
    assert len(found(parts).text) in (0, len(text))
