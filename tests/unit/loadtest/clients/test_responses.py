"""The OpenAI API's responses and embeddings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.loadtest.clients.embeddings import EmbeddingsClient
from penstock.loadtest.clients.responses import ResponsesClient
from penstock.loadtest.errors import MALFORMED, STREAM_ERROR, TRUNCATED, LoadTestError
from penstock.loadtest.messages import Answer
from unit.loadtest.clients.wires import (
    CALL,
    CHUNKED_HEAD,
    LAST_CHUNK,
    OPTIONS,
    answered,
    body_of,
    chunk,
    chunked,
    whole,
)

USAGE = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
CUT = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": USAGE}


def event(kind: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": kind} | fields)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def delta(text: str, kind: str = "output_text") -> bytes:
    return event(f"response.{kind}.delta", delta=text, sequence_number=4)


STREAM = [
    event("response.created", response={"status": "in_progress"}),
    event("response.output_item.added", item={"type": "message"}),
    delta("one"),
    delta(" two"),
    event("response.output_text.done", text="one two"),
    event("response.completed", response={"status": "completed", "usage": USAGE}),
]


def client_of(**options: Any) -> ResponsesClient:
    return ResponsesClient(msgspec.structs.replace(OPTIONS, **options))


async def streamed(*events: bytes, **options: Any) -> Answer:
    return await answered(client_of(**options), [CHUNKED_HEAD, *map(chunk, events), LAST_CHUNK])


async def test_a_stream() -> None:
    answer = await streamed(*STREAM, keep_text=True)
    assert answer.error == ""
    assert answer.arrivals == [4.0, 5.0]
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (5, 3, "stop")
    assert answer.text == "one two"


@pytest.mark.parametrize("kind", ["response.incomplete", "response.completed"])
async def test_a_stream_that_was_long_enough(kind: str) -> None:
    answer = await streamed(*STREAM[:-1], event(kind, response=CUT), b"data: [DONE]\n\n")
    assert (answer.error, answer.finish_reason, answer.output_tokens) == ("", "length", 3)


@pytest.mark.parametrize("kind", ["reasoning_text", "reasoning_summary_text", "refusal", "function_call_arguments"])
async def test_other_output_than_text(kind: str) -> None:
    answer = await streamed(STREAM[0], delta("x", kind), *STREAM[2:], keep_text=True)
    assert answer.arrivals == [3.0, 4.0, 5.0]
    assert answer.text == "one two"


async def test_an_empty_delta_is_no_output() -> None:
    assert (await streamed(STREAM[0], delta(""), *STREAM[2:])).arrivals == [4.0, 5.0]


async def test_a_stream_that_breaks_off() -> None:
    assert (await streamed(*STREAM[:-1])).error == TRUNCATED
    raw = chunked(*STREAM)
    for at in range(1, len(raw)):
        assert (await answered(client_of(), [raw[:at]], lost=True)).error == TRUNCATED


@pytest.mark.parametrize(
    "failure", [event("error", message="died"), event("response.failed", response={"error": {"message": "died"}})]
)
async def test_an_error_within_a_stream(failure: bytes) -> None:
    answer = await streamed(*STREAM[:3], failure)
    assert answer.error == STREAM_ERROR
    assert "died" in answer.detail


@pytest.mark.parametrize("bad", [b"data: {}\n\n", b'data: {"type":"response.completed"}\n\n', b"data: {\n\n"])
async def test_events_that_are_not_the_protocols(bad: bytes) -> None:
    assert (await streamed(*STREAM[:3], bad)).error == MALFORMED


async def test_text_that_is_none() -> None:
    bad = event("response.output_text.delta", delta={"a": 1})
    assert (await streamed(*STREAM[:3], bad, *STREAM[3:], keep_text=True)).error == MALFORMED
    negative = event("response.completed", response={"usage": USAGE | {"output_tokens": -1}})
    assert (await streamed(*STREAM[:-1], negative)).error == MALFORMED


async def test_a_whole_response() -> None:
    output = [{"type": "reasoning"}, {"type": "message", "content": [{"type": "output_text", "text": "one two"}]}]
    client = client_of(stream=False, keep_text=True)
    answer = await answered(client, [whole(msgspec.json.encode(CUT | {"output": output}))])
    assert (answer.error, answer.arrivals, answer.pieces) == ("", [], [])
    assert (answer.text, answer.finish_reason, answer.prompt_tokens) == ("one two", "length", 5)


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b'{"status":"failed","output":[{}]}', b'{"error":{"message":"x"},"output":[{}]}']
)
async def test_a_whole_response_that_is_none(body: bytes) -> None:
    assert (await answered(client_of(stream=False), [whole(body)])).error == MALFORMED


def test_requests_for_responses() -> None:
    assert body_of(client_of().request(CALL)) == {
        "model": "m",
        "input": "hello",
        "store": False,
        "max_output_tokens": 4,
        "ignore_eos": True,
        "stream": True,
    }
    chat = msgspec.structs.replace(CALL, prompt=[{"role": "user", "content": "x"}])
    body: Any = body_of(client_of(ignore_eos=False, stream=False).request(chat))
    assert body == {"model": "m", "input": chat.prompt, "store": False, "max_output_tokens": 4}
    with pytest.raises(LoadTestError, match="token ids"):
        client_of().request(msgspec.structs.replace(CALL, prompt=[1]))


def embeddings(size: int = 1) -> EmbeddingsClient:
    return EmbeddingsClient(msgspec.structs.replace(OPTIONS, batch_size=size))


@pytest.mark.parametrize(
    ("prompt", "size", "expected"),
    [
        ("a b c", 1, "a b c"),
        ("a b c", 3, ["a b c", "b c a", "c a b"]),
        ([1, 2], 1, [1, 2]),
        ([1, 2], 2, [[1, 2], [2, 1]]),
    ],
)
def test_inputs_of_embeddings(prompt: Any, size: int, expected: Any) -> None:
    body = body_of(embeddings(size).request(msgspec.structs.replace(CALL, prompt=prompt)))
    assert body == {"model": "m", "input": expected}


@pytest.mark.parametrize("vector", [[0.5, -1.0], "AAAAPwAAgL8="])
async def test_embeddings_count_prompt_tokens_and_no_output(vector: object) -> None:
    body = {"data": [{"embedding": vector}] * 2, "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    answer = await answered(embeddings(2), [whole(msgspec.json.encode(body))])
    assert (answer.error, answer.output_tokens, answer.prompt_tokens, answer.arrivals) == ("", 0, 7, [])


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"data":[]}', b'{"data":[{"embedding":[1.0]}]}', b'{"data":[{"embedding":[1.0]},{"embedding":[]}]}'],
)
async def test_embeddings_that_are_missing(body: bytes) -> None:
    assert (await answered(embeddings(2), [whole(body)])).error == MALFORMED
