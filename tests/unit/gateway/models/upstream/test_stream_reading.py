"""From the bytes of another server's stream to a client's frames."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.errors import ContextLengthError, OverloadedError
from penstock.gateway.errors import UpstreamError
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.models.upstream.answer_reading import (
    MAX_EVENT,
    AnswerReader,
    HeldAnswer,
    HeldAnswers,
    StreamReader,
)
from penstock.gateway.models.upstream.failures import Redactor
from support.upstream import USAGE, delta, event

GOOD = [event(delta(None)), event(delta("Grü")), event(delta("ße\n\n!")), event(delta(None, "stop")), event(USAGE)]


def reader(*, shows_usage: bool = False, choices: int = 1, room: int = 1 << 30) -> StreamReader:
    held = HeldAnswer(HeldAnswers(room))
    answer = AnswerReader("public", Usage(prompt_tokens=99), Redactor(["secret"]), held, choices=choices)
    return StreamReader(answer, shows_usage=shows_usage)


def usage_of(stream: StreamReader) -> Usage:
    return stream._answer.usage


def shown(frames: bytes) -> list[Any]:
    return [json.loads(frame[6:]) for frame in frames.split(b"\n\n") if frame.startswith(b"data: ")]


@given(st.lists(st.integers(1, 400), max_size=20), st.booleans())
def test_pieces_may_be_cut_anywhere(cuts: list[int], returns: bool) -> None:
    data = b"".join(GOOD) + event("[DONE]") + event(delta("never"))
    data = data.replace(b"\n", b"\r\n") if returns else data
    stream, frames, rest = reader(), b"", data
    for cut in cuts:
        frames += stream.feed(rest[:cut])
        rest = rest[cut:]
    frames += stream.feed(rest)
    assert frames == reader().feed(b"".join(GOOD))
    assert stream.done
    assert stream.error is None
    assert stream.finish_reasons == ("stop",)
    assert usage_of(stream) == Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)


def test_names_are_public_and_unknown_fields_stay() -> None:
    [frame] = shown(reader().feed(event(delta("a") | {"provider": {"model": "inner-name"}})))
    assert frame["model"] == "public"
    assert frame["provider"] == {"model": "inner-name"}


def test_usage_is_hidden_where_nobody_asked_for_it() -> None:
    beside = event(delta("a") | {"usage": None}) + event(USAGE)
    assert [("usage" in frame) for frame in shown(reader().feed(beside))] == [False]
    assert [("usage" in frame) for frame in shown(reader(shows_usage=True).feed(beside))] == [True, True]


def test_without_usage_tokens_are_estimated() -> None:
    stream = reader()
    stream.feed(event(delta(None)) + event(delta("a")) + event(delta("b")))
    assert (usage_of(stream).prompt_tokens, usage_of(stream).completion_tokens) == (99, 2)


@pytest.mark.parametrize("story", [b"", GOOD[1], GOOD[1] + event(delta(None, "stop")) + event(delta("x", index=1))])
def test_a_stream_that_ends_in_the_middle_is_broken(story: bytes) -> None:
    stream = reader()
    stream.feed(story)
    with pytest.raises(UpstreamError, match="ended in the middle"):
        stream.end()


def test_all_choices_that_were_asked_for_have_to_end() -> None:
    stream = reader(choices=2)
    stream.feed(GOOD[1] + event(delta(None, "stop")))
    with pytest.raises(UpstreamError, match="ended in the middle"):
        stream.end()
    stream.feed(event(delta(None, "stop", index=1)))
    stream.end()


def test_an_event_of_several_lines_is_one_line() -> None:
    assert reader().feed(b'data: {"id": 1,\ndata:  "choices": []}\n\n') == b'data: {"id":1,"choices":[]}\n\n'


@pytest.mark.parametrize("line", [b"x", b"data: x\n"])
def test_what_is_not_complete_has_a_bound_for_all_answers(line: bytes) -> None:
    stream = reader(room=1 << 20)
    stream.feed(line * 70_000)
    held = stream._answer.held._answers
    assert held.held
    for _ in range(20):
        stream.feed(line * (1 << 16))
    assert isinstance(stream.error, OverloadedError)
    stream._answer.held.note(0)
    assert held.held == 0


@pytest.mark.parametrize("last", [event(delta(None, "stop")), event("[DONE]")])
def test_an_end_may_be_said_in_two_ways(last: bytes) -> None:
    stream = reader()
    stream.feed(GOOD[1] + last)
    stream.end()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"data: nonsense\n\n", "not JSON"),
        (b"data: [1]\n\n", "not JSON"),
        (b'data: {"choices": [{"index": 4096}]}\n\n', "choices"),
        (b'data: {"choices": {"a": 1}}\n\n', "choices"),
        (b'data: {"id": "x"}\n\n', "no choices"),
        (b"data: \xff\xfe\n\n", "not JSON"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not JSON"),
        (event({"error": {"message": "the secret is out"}}), "the \\*\\*\\* is out"),
        (event({"error": "plain"}), "plain"),
        (b"data: " + b"x" * (MAX_EVENT + 1), "longer"),
        (b"data: xxxxxxxx\n" * (MAX_EVENT // 8), "longer"),
    ],
)
def test_a_broken_event_ends_the_stream_and_what_came_before_is_good(bad: bytes, says: str) -> None:
    stream = reader()
    frames = stream.feed(GOOD[1] + bad + GOOD[2])
    assert len(shown(frames)) == 1
    assert isinstance(stream.error, UpstreamError)
    with pytest.raises(UpstreamError, match=says):
        raise stream.error


def test_a_prompt_that_is_too_long_is_the_callers_fault() -> None:
    stream = reader()
    stream.feed(event({"error": {"message": "too long", "code": "context_length_exceeded"}}))
    assert isinstance(stream.error, ContextLengthError)


def test_comments_stay_comments() -> None:
    assert reader().feed(b": working\n\nevent: ping\n\n") == b": keep-alive\n\n"
