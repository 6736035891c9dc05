"""The events of a stream, and that they add up to what a whole response says."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.errors import EngineError, RateLimitedError
from penstock.gateway.apis.responses.answer import ResponseObject
from penstock.gateway.apis.responses.events import Output, ResponseEvents, StreamErrors
from penstock.gateway.apis.responses.items import encode_reasoning
from penstock.gateway.apis.responses.schemas import Include, ResponsesRequest
from penstock.gateway.models.language.choice_output import TokenLogprob
from penstock.gateway.models.language.dataplane import ChoiceDelta, Usage
from penstock.gateway.requests.record import RequestRecord
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart
from support.messages import events_of
from support.responses import accumulated, validated_response

NOTHING = Include()
TEXT = st.text('a"\\\n é🙂', min_size=1, max_size=5)


class Stream:
    def __init__(self, include: Include = NOTHING, usage: Usage | None = None) -> None:
        asked = msgspec.convert({"model": "m", "input": "hi"}, ResponsesRequest)
        response = ResponseObject(
            asked, usage or Usage(), RequestRecord(), temperature=1.0, top_p=1.0, store=True, tier="default"
        )
        self.kept: list[Mapping[str, Any]] = []
        self.events = ResponseEvents(response, self.kept.append, include)

    def whole(self, *batches: list[ChoiceDelta]) -> list[dict[str, Any]]:
        data = self.events.opening() + b"".join([self.events.render(batch) for batch in batches])
        assert self.events.live == 0
        found = events_of(data + self.events.ending())
        assert msgspec.to_builtins(self.kept) == [validated_response(found[-1]["response"])]
        return found


def delta(parts: list[Part] | None = None, text: str = "", finish: str | None = None, **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(0, text, [1], finish, parts=parts, **fields)


def plain(item: dict[str, Any]) -> tuple[Any, ...]:
    """An item without its ids."""
    if item["type"] == "function_call":
        return item["type"], item["status"], item["name"], item["arguments"]
    return item["type"], item["status"], *[part["text"] for part in item["content"]]


def test_a_stream_with_everything_in_it() -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=6, reasoning_tokens=1)
    first = [delta([ReasoningPart("Hm")]), delta([ReasoningPart("."), TextPart("I")])]
    second = [delta([TextPart("."), ToolCallPart(0, "", "weather", "x:0"), ToolCallPart(0, '{"a"')])]
    last = [delta([ToolCallPart(0, ":1}")], finish="stop")]
    events = Stream(usage=usage).whole(first, second, last)
    output = accumulated(events)
    assert [plain(item) for item in output] == [
        ("reasoning", "completed", "Hm."),
        ("message", "completed", "I."),
        ("function_call", "completed", "weather", '{"a":1}'),
    ]
    assert output[2]["call_id"] == "x:0"
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", *["reasoning_text.delta"] * 2, "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *["output_text.delta"] * 2, "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 16,
    }


def test_text_of_a_model_without_parsers_and_how_it_was_cut_off() -> None:
    events = Stream().whole([delta(text="a")], [delta(text="")], [delta(text='"\n', finish="length")])
    assert [plain(item) for item in accumulated(events)] == [("message", "incomplete", 'a"\n')]
    end = events[-1]["response"]
    assert (end["status"], end["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_an_answer_of_nothing_has_no_item() -> None:
    assert accumulated(Stream().whole([delta(finish="stop")])) == []


def test_logprobs_are_those_of_the_text() -> None:
    entries = [TokenLogprob("a", 1, -1.0, [97], []), TokenLogprob("b", 2, -2.0, [98], [])]
    stream = Stream(Include(logprobs=True))
    batches = [delta(text=text, logprobs=[each]) for text, each in zip(("", "ab"), entries, strict=True)]
    events = stream.whole(batches, [delta(finish="stop")])
    [item] = accumulated(events)
    said = [(each["token"], each["logprob"]) for each in item["content"][0]["logprobs"]]
    assert said == [("a", -1.0), ("b", -2.0)]
    pieces = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [each["token"] for piece in pieces for each in piece] == ["a", "b"]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_thoughts_are_encoded_for_those_who_ask(finish: str) -> None:
    include = Include(encrypted_reasoning=True)
    parts: list[Part] = [ReasoningPart("H"), ReasoningPart("m"), TextPart("I."), ReasoningPart("Wait")]
    events = Stream(include).whole([delta([part]) for part in parts], [delta([], finish=finish)])
    streamed = accumulated(events)
    whole = Output(include)
    whole.add(delta(parts, finish=finish))
    for items in (streamed, whole.items):
        encoded = [item.get("encrypted_content") for item in items]
        assert encoded == [encode_reasoning("Hm"), None, encode_reasoning("Wait")]


@pytest.mark.parametrize(
    ("error", "code"), [(EngineError("broken"), "server_error"), (RateLimitedError("much"), "rate_limit_exceeded")]
)
def test_a_stream_that_fails(error: Exception, code: str) -> None:
    stream = Stream()
    data = stream.events.opening() + stream.events.render([delta(text="a")])
    events = events_of(data + StreamErrors(stream.events).last_events(error, "id"))
    assert [plain(item) for item in accumulated(events)] == [("message", "incomplete", "a")]
    end = events[-1]["response"]
    assert (end["status"], end["error"]) == ("failed", {"code": code, "message": str(error)})
    assert stream.kept == [end]


def test_before_a_response_has_begun_there_is_only_an_error() -> None:
    stream = Stream()
    [event] = events_of(StreamErrors(stream.events).last_events(EngineError("broken"), "id"))
    said = {"code": "engine_error", "message": "broken", "param": None, "sequence_number": 0}
    assert event == {"type": "error", **said}
    assert stream.kept == []


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


@given(parts=answers(), cuts=st.sets(st.integers(0, 30)), finish=st.sampled_from(["stop", "length"]))
def test_however_it_arrives_a_stream_adds_up_to_the_whole_response(
    parts: list[Part], cuts: set[int], finish: str
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(parts)), len(parts)]
    batches = [[delta(parts[start:end])] for start, end in pairwise(edges)]
    whole = Output(NOTHING)
    whole.add(delta(parts, finish=finish))
    streamed = accumulated(Stream().whole(*batches, [delta([], finish=finish)]))
    assert [plain(item) for item in streamed] == [plain(item) for item in whole.items]


@given(parts=answers(), cut=st.integers(0, 30))
def test_wherever_a_stream_fails_everything_is_closed(parts: list[Part], cut: int) -> None:
    stream = Stream()
    sent = parts[:cut]
    data = stream.events.opening() + b"".join([stream.events.render([delta([part])]) for part in sent])
    output = accumulated(events_of(data + stream.events.failing(EngineError("broken"))))
    whole = Output(NOTHING)
    whole.add(delta(sent))
    whole.close("incomplete")
    assert [plain(item) for item in output] == [plain(item) for item in whole.items]
