"""The events of a stream, and that they add up to what a whole answer says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.anthropic.answers import SIGNATURE, MessageEvents, content_blocks, stop_fields
from penstock.gateway.models.language.dataplane import ChoiceDelta, Usage
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart
from support.messages import accumulated, events_of

TEXT = st.text('a"\\\n é🙂', min_size=1, max_size=5)
"""Few characters: without a cache, the table of all of them takes Hypothesis seconds, and then the test fails."""


def delta(parts: list[Part] | None = None, text: str = "", finish: str | None = None, **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(0, text, [1], finish, parts=parts, **fields)


def whole(*batches: list[ChoiceDelta], usage: Usage | None = None) -> list[dict[str, Any]]:
    events = MessageEvents("m", usage or Usage())
    data = events.opening() + b"".join([events.render(batch) for batch in batches]) + events.ending()
    assert events.live == 0
    return events_of(data)


def test_a_stream_with_everything_in_it() -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=4)
    first = [delta([ReasoningPart("Hm")]), delta([ReasoningPart("."), TextPart("I look")])]
    second = [delta([TextPart("."), ToolCallPart(0, "", "weather", "x:0"), ToolCallPart(0, '{"a"')])]
    last = [delta([ToolCallPart(0, ":1}")], finish="stop")]
    start, *rest = whole(first, second, last, usage=usage)
    message = start["message"]
    assert message.pop("id").startswith("msg_")
    counts = {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 0}
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
    assert message == {"type": "message", "role": "assistant", "model": "m", **nothing, "usage": counts}

    def piece(index: int, kind: str, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}

    tool = {"type": "tool_use", "id": "x:0", "name": "weather", "input": {}}
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {"type": "ping"},
        piece(0, "thinking_delta", thinking="Hm"),
        piece(0, "thinking_delta", thinking="."),
        piece(0, "signature_delta", signature=SIGNATURE),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        piece(1, "text_delta", text="I look"),
        piece(1, "text_delta", text="."),
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": tool},
        piece(2, "input_json_delta", partial_json='{"a"'),
        piece(2, "input_json_delta", partial_json=":1}"),
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": counts},
        {"type": "message_stop"},
    ]


def test_text_of_a_model_without_parsers() -> None:
    events = whole([delta(text="a")], [delta(text="")], [delta(text='"\n', finish="length")])
    assert accumulated(events) == [{"type": "text", "text": 'a"\n'}]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_an_answer_of_nothing_has_no_block() -> None:
    assert accumulated(whole([delta(finish="stop")])) == []
    assert content_blocks([]) == []


def test_calls_behind_each_other_are_blocks_of_their_own() -> None:
    parts: list[Part] = [ToolCallPart(0, "{}", "a"), ToolCallPart(1, "{}", "b")]
    blocks = accumulated(whole([delta(parts, finish="stop")]))
    assert [(block["name"], block["id"][:6]) for block in blocks] == [("a", "toolu_"), ("b", "toolu_")]
    assert blocks[0]["id"] != blocks[1]["id"]


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "", "[" * 200])
def test_the_input_of_a_call_that_was_cut_off_is_empty(arguments: str) -> None:
    [block] = content_blocks([ToolCallPart(0, arguments, "a", "id")])
    assert block == {"type": "tool_use", "id": "id", "name": "a", "input": {}}


@pytest.mark.parametrize(
    ("finish", "by", "called", "reason", "sequence"),
    [
        ("stop", None, False, "end_turn", None),
        ("stop", 7, False, "end_turn", None),
        ("stop", "###", False, "stop_sequence", "###"),
        ("stop", "###", True, "stop_sequence", "###"),
        ("stop", None, True, "tool_use", None),
        ("length", None, True, "max_tokens", None),
        ("length", None, False, "max_tokens", None),
    ],
)
def test_why_it_stopped(finish: str, by: str | int | None, called: bool, reason: str, sequence: str | None) -> None:
    assert stop_fields(finish, by, called=called) == {"stop_reason": reason, "stop_sequence": sequence}


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """Parts as parsers give them: calls count up, and the first part of each has its name."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=6)):
        if kind == "call":
            pieces = ['{"a": ', "[1]", "}"]
            parts += [ToolCallPart(calls, "", "f", f"id{calls}"), *(ToolCallPart(calls, piece) for piece in pieces)]
            calls += 1
        else:
            make = TextPart if kind == "text" else ReasoningPart
            parts += [make(text) for text in draw(st.lists(TEXT, min_size=1, max_size=3))]
    return parts


@given(parts=answers(), cuts=st.sets(st.integers(0, 30)))
def test_however_it_arrives_a_stream_adds_up_to_the_whole_answer(parts: list[Part], cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(parts)), len(parts)]
    batches = [[delta(parts[start:end])] for start, end in pairwise(edges)]
    assert accumulated(whole(*batches, [delta([], finish="stop")])) == content_blocks(parts)
