"""What is sent to the OpenAI API, and what is made of its answers."""

from __future__ import annotations

import gzip
from typing import Any

import msgspec
import pytest

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.openai import CompletionsClient
from penstock.loadtest.errors import MALFORMED, STREAM_ERROR, TRUNCATED, LoadTestError
from penstock.loadtest.messages import Answer, Call
from unit.loadtest.clients.wires import (
    CALL,
    CHUNKED_HEAD,
    LAST_CHUNK,
    OPTIONS,
    answered,
    body_of,
    chunk,
    chunked,
    event,
    whole,
)

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
DONE = b"data: [DONE]\n\n"


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    fields = more if content is None else {"content": content} | more
    return event(id="x", choices=[{"index": 0, "delta": fields, "finish_reason": finish}], usage=None)


STREAM = [
    delta("", role="assistant"),
    delta("one"),
    delta(" two"),
    delta("", "length"),
    event(id="x", choices=[], usage=USAGE),
    DONE,
]


def client_of(*, chat: bool = True, **options: Any) -> CompletionsClient:
    return CompletionsClient(msgspec.structs.replace(OPTIONS, **options), chat=chat)


async def streamed(*events: bytes, **options: Any) -> Answer:
    """Each event in a read of its own: the first at time 2, since the head is read 1."""
    reads = [CHUNKED_HEAD, *map(chunk, events), LAST_CHUNK]
    return await answered(client_of(**options), reads)


async def test_a_stream() -> None:
    answer = await streamed(*STREAM)
    assert answer.error == ""
    assert answer.arrivals == [3.0, 4.0], "the role alone is no output, nor is the finish reason"
    assert (answer.sent, answer.ended, answer.reads) == (0.0, 8.0, 8)
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (5, 3, "length")
    assert answer.text is None
    assert answer.pieces == []


async def test_a_stream_that_breaks_off_anywhere_is_truncated() -> None:
    raw = chunked(*STREAM)
    for at in range(1, len(raw)):
        answer = await answered(client_of(), [raw[:at]], lost=True)
        assert answer.error == TRUNCATED
    raw = CHUNKED_HEAD.replace(b"Transfer-Encoding: chunked", b"Connection: close") + b"".join(STREAM)
    for at in range(raw.index(b"\r\n\r\n") + 4, len(raw)):
        answer = await answered(client_of(), [raw[:at]], lost=True)
        assert answer.error == TRUNCATED
    assert (await answered(client_of(), [raw], lost=True)).error == ""


@pytest.mark.parametrize("line", [b"\r\n", b"\r"])
async def test_other_line_ends(line: bytes) -> None:
    answer = await streamed(*(text.replace(b"\n", line) for text in STREAM))
    assert (answer.error, answer.arrivals, answer.output_tokens) == ("", [3.0, 4.0], 3)


async def test_comments_while_nothing_comes() -> None:
    answer = await streamed(b": ping\n\n", *STREAM[:2], b": ping\n\n", *STREAM[2:])
    assert (answer.error, answer.arrivals) == ("", [4.0, 6.0])


async def test_what_came_together_has_one_time() -> None:
    answer = await answered(client_of(), [CHUNKED_HEAD, b"".join(map(chunk, STREAM)), LAST_CHUNK])
    assert answer.arrivals == [2.0, 2.0]
    assert answer.reads == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
async def test_other_output_than_content(fields: dict[str, Any]) -> None:
    answer = await streamed(STREAM[0], delta(**fields), *STREAM[1:])
    assert answer.arrivals == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("fields", [{"tool_calls": []}, {"tool_calls": None}, {"reasoning_content": ""}, {}])
async def test_no_output(fields: dict[str, Any]) -> None:
    answer = await streamed(STREAM[0], delta(**fields), *STREAM[1:])
    assert answer.arrivals == [4.0, 5.0]


async def test_completions_have_text() -> None:
    texts = [event(choices=[{"text": text, "finish_reason": None}]) for text in ("a", "", "b")]
    end = event(choices=[{"text": "c", "finish_reason": "stop"}])
    answer = await streamed(*texts, end, DONE, chat=False, keep_text=True)
    assert answer.arrivals == [2.0, 4.0, 5.0]
    assert (answer.text, answer.finish_reason, answer.output_tokens) == ("abc", "stop", None)


@pytest.mark.parametrize(
    ("dropped", "detail"),
    [(DONE, "without [DONE]"), (STREAM[3], "no finish reason")],
)
async def test_a_stream_without_its_end(dropped: bytes, detail: str) -> None:
    answer = await streamed(*(text for text in STREAM if text != dropped))
    assert answer.error == TRUNCATED
    assert detail in answer.detail


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled"])
async def test_an_answer_that_the_server_gave_up(reason: str) -> None:
    choice = {"delta": {}, "message": {"content": "a"}, "finish_reason": reason}
    for answer in (
        await streamed(*STREAM[:3], event(choices=[choice]), DONE),
        await answered(client_of(stream=False), [whole(msgspec.json.encode({"choices": [choice]}))]),
    ):
        assert answer.error == TRUNCATED
        assert reason in answer.detail


async def test_an_empty_finish_reason_is_none() -> None:
    chunks = [event(choices=[{"delta": {"content": "a"}, "finish_reason": ""}]) for _ in range(3)]
    answer = await streamed(*chunks, DONE)
    assert (answer.error, answer.detail) == (TRUNCATED, "the stream has no finish reason")
    assert (await streamed(*chunks, *STREAM)).error == ""


async def test_choices_that_are_null_are_none() -> None:
    answer = await streamed(*STREAM[:4], event(choices=None, usage=USAGE), DONE)
    assert (answer.error, answer.output_tokens) == ("", 3)


async def test_servers_that_send_no_end_mark() -> None:
    answer = await streamed(*STREAM[:-1], end_mark=False)
    assert (answer.error, answer.output_tokens) == ("", 3)
    answer = await streamed(*STREAM[:3], end_mark=False)
    assert (answer.error, answer.detail) == (TRUNCATED, "the stream has no finish reason")


@pytest.mark.parametrize(
    "error",
    [
        event(error={"message": "engine died", "code": 500}),
        event(error="engine died"),
        event(object="error", message="engine died", code=500),
    ],
)
async def test_an_error_within_a_stream(error: bytes) -> None:
    answer = await streamed(*STREAM[:3], error, DONE)
    assert answer.error == STREAM_ERROR
    assert "engine died" in answer.detail
    assert answer.arrivals == [3.0, 4.0]


async def test_an_error_that_is_null_is_none() -> None:
    answer = await streamed(event(error=None, choices=[]), *STREAM)
    assert answer.error == ""


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {\n\n",
        b"data: []\n\n",
        b"data: null\n\n",
        b'data: {"choices":[1]}\n\n',
        b"data: \xff\n\n",
        event(usage=USAGE | {"completion_tokens": -3}),
        event(usage=USAGE | {"prompt_tokens": 10**30}),
        b'data: {"new":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n",
    ],
)
async def test_events_that_are_not_the_protocols(bad: bytes) -> None:
    assert (await streamed(*STREAM[:2], bad, *STREAM[2:])).error == MALFORMED


async def test_no_stream_where_one_was_asked_for() -> None:
    answer = await answered(client_of(), [whole(b'{"choices":[]}')])
    assert answer.error == MALFORMED
    assert "choices" in answer.detail
    assert (await answered(client_of(), [chunked()])).error == TRUNCATED
    kind = b"text/event-stream"
    assert (await answered(client_of(), [chunked(*STREAM).replace(kind, kind + b"; charset=utf-8")])).error == ""
    assert (await answered(client_of(), [chunked(*STREAM).replace(kind, b"Text/Event-Stream")])).error == ""
    assert (await answered(client_of(), [chunked(*STREAM).replace(kind, b"text/html")])).error == MALFORMED


@pytest.mark.parametrize("stream", [True, False])
async def test_a_coding_that_nobody_asked_for_is_named(stream: bool) -> None:
    packed = chunked(gzip.compress(b"".join(STREAM)))
    for coding, named in ((b"gzip", True), (b"identity", False)):
        raw = packed.replace(b"\r\n\r\n", b"\r\nContent-Encoding: " + coding + b"\r\n\r\n", 1)
        answer = await answered(client_of(stream=stream), [raw])
        assert answer.error
        assert ("gzip" in answer.detail) is named


async def test_a_redirect_is_an_error_that_says_where_to() -> None:
    raw = whole(b"<html>", status="307 Temporary Redirect", fields="Location: https://h/v1\r\n")
    answer = await answered(client_of(), [raw])
    assert (answer.error, answer.detail) == ("http_307", "to https://h/v1")


@pytest.mark.parametrize(
    "status", ["400 Bad Request", "429 Too Many Requests", "503 Service Unavailable", "206 Partial"]
)
async def test_a_bad_status_is_an_error_with_the_body_s_beginning(status: str) -> None:
    answer = await answered(client_of(), [whole(b"x" * 1000, status=status)])
    assert answer.error == f"http_{status[:3]}"
    assert answer.detail == "x" * 300


async def test_a_whole_answer() -> None:
    body = msgspec.json.encode(
        {"choices": [{"message": {"content": "one two"}, "finish_reason": "stop"}], "usage": USAGE}
    )
    raw = whole(body)
    answer = await answered(client_of(stream=False, keep_text=True), [raw[:30], raw[30:]])
    assert answer.error == ""
    assert (answer.arrivals, answer.pieces, answer.ended) == ([], [], 2.0)
    assert (answer.text, answer.finish_reason, answer.prompt_tokens) == ("one two", "stop", 5)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"error":"x"}', b'{"choices":[]}', b"\xff"])
async def test_a_whole_answer_that_is_none(body: bytes) -> None:
    assert (await answered(client_of(stream=False), [whole(body)])).error == MALFORMED


def sent(client: CompletionsClient, call: Call = CALL) -> Any:
    return body_of(client.request(call))


def test_requests_have_what_was_asked_for_and_no_more() -> None:
    assert sent(client_of()) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert sent(client_of(chat=False, stream=False, ignore_eos=False)) == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 4,
    }


def test_what_is_added_to_requests_and_left_out() -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 9, "ignore_eos": False}
    body = sent(client_of(extra=extra))
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["ignore_eos"]) == (9, False)


def test_kinds_of_prompts() -> None:
    ids = msgspec.structs.replace(CALL, prompt=[1, 2])
    chat = msgspec.structs.replace(CALL, prompt=[{"role": "system", "content": "s"}])
    assert sent(client_of(chat=False), ids)["prompt"] == [1, 2]
    assert sent(client_of(), chat)["messages"] == [{"role": "system", "content": "s"}]
    with pytest.raises(LoadTestError, match="token ids"):
        client_of().request(ids)
    with pytest.raises(LoadTestError, match="chats"):
        client_of(chat=False).request(chat)


def test_an_address_that_is_none() -> None:
    with pytest.raises(LoadTestError, match="address"):
        CompletionsClient(ClientOptions(url="nothing://x"), chat=True)
