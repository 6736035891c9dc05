"""Responses of HTTP/1.1 in whatever pieces they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtest.clients.http1 import ConnectionLostError
from penstock.loadtest.clients.response import HttpResponse, MalformedError
from unit.loadtest.clients.wires import CHUNKED_HEAD, LAST_CHUNK, ByHand, chunk, chunked, whole

EVENTS = [b"data: one\n\n", b"data: two\r\n\r\n", b"0\r\n\r\n", b"data: 4\n\n\r\n\r\n"]
BODY = b"".join(EVENTS)
EXTENDED = CHUNKED_HEAD + b"".join(b"%X;name=value\r\n%b\r\n" % (len(e), e) for e in EVENTS)
RESPONSES = {
    "length": whole(BODY),
    "length, other case": whole(BODY).replace(b"Content-Length: ", b"content-length:\t"),
    "chunked": chunked(*EVENTS),
    "one chunk": chunked(BODY),
    "chunk extensions": EXTENDED + LAST_CHUNK,
    "trailers": EXTENDED + b"0\r\nX-Took: 1\r\nX-More: 2\r\n\r\n",
    "several zeros": EXTENDED + b"000;last\r\n\r\n",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + chunked(*EVENTS),
    "length and chunks": chunked(*EVENTS).replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n", 1),
}


async def read(*reads: bytes, lost: bool = False) -> HttpResponse:
    return await ByHand(reads, lost=lost).exchange(b"")


def body(answer: HttpResponse) -> bytes:
    assert answer.status == 200
    return answer.body


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_response_can_be_split_anywhere(name: str) -> None:
    raw = RESPONSES[name]
    assert body(await read(raw)) == BODY
    for at in range(1, len(raw)):
        assert body(await read(raw[:at], raw[at:])) == BODY, raw[:at]
    assert body(await read(*(raw[at : at + 1] for at in range(len(raw))))) == BODY


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_response_that_breaks_off_anywhere_is_lost(name: str) -> None:
    raw = RESPONSES[name]
    for at in range(len(raw)):
        with pytest.raises(ConnectionLostError) as caught:
            await read(*([raw[:at]] if at else []), lost=True)
        assert (caught.value.answer is not None) == (at > 0)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
async def test_any_body_in_any_chunks_in_any_reads(pieces: list[bytes], data: st.DataObject) -> None:
    raw = chunked(*pieces)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    reads = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert body(await read(*reads)) == b"".join(pieces)


async def test_the_end_of_the_connection_ends_a_body_of_unknown_length() -> None:
    raw = b"HTTP/1.0 200 OK\r\n\r\nall of it"
    assert body(await read(raw[:20], raw[20:], lost=True)) == b"all of it"


async def test_a_reset_is_no_end() -> None:
    by_hand = ByHand([b"HTTP/1.0 200 OK\r\n\r\nall of it"], lost=True, cause=ConnectionResetError())
    with pytest.raises(ConnectionLostError):
        await by_hand.exchange(b"")


@pytest.mark.parametrize("unsent", [0, 1])
async def test_a_request_that_was_answered_before_it_was_all_sent_ends_the_connection(unsent: int) -> None:
    by_hand = ByHand([whole(b"x")])
    by_hand.wire.unsent = unsent
    await by_hand.exchange(b"")
    assert by_hand.wire.aborted is bool(unsent)


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_no_content_needs_no_length(status: str) -> None:
    answer = await read(f"HTTP/1.1 {status}\r\n\r\n".encode())
    assert answer.body == b""


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"<html>",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\ngarbage",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17),
        CHUNKED_HEAD + b"-5\r\nhello\r\n" + LAST_CHUNK,
        CHUNKED_HEAD + b"1_0\r\nhello\r\n" + LAST_CHUNK,
        CHUNKED_HEAD + b"five\r\nhello\r\n" + LAST_CHUNK,
        CHUNKED_HEAD + b"\r\n" + LAST_CHUNK,
        CHUNKED_HEAD + b"2\r\nhello\r\n" + LAST_CHUNK,
        CHUNKED_HEAD + b"x" * (1 << 13) + b"\r\n\r\n",
    ],
)
async def test_what_is_no_http_says_so_at_once(raw: bytes) -> None:
    with pytest.raises(MalformedError):
        await read(raw)


@pytest.mark.parametrize("length", [b"9" * 5000, b"-5", b"abc", b"", b"3, 3"])
async def test_a_length_that_is_none_is_no_reason_to_wait(length: bytes) -> None:
    with pytest.raises(MalformedError, match=r"Content-Length"):
        await read(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\nxyz")


async def test_the_last_chunk_counts_whatever_comes_with_it() -> None:
    """It is noticed at the latest when the connection ends."""
    [head, rest] = [CHUNKED_HEAD, chunked(*EVENTS).removeprefix(CHUNKED_HEAD)]
    by_hand = ByHand([head, rest + b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n"], lost=True)
    assert body(await by_hand.exchange(b"")) == b"".join(EVENTS)


async def test_fields_of_a_head() -> None:
    answer = await read(whole(b"", fields="X-One:  1 \r\ninference-header-content-length:42\r\n"))
    assert answer.field("Inference-Header-Content-Length") == "42"
    assert answer.field("x-one") == "1"
    assert answer.field("One") is None


async def test_trailers_are_no_fields_of_the_head() -> None:
    answer = await read(CHUNKED_HEAD + b"0\r\nX-Took: 1\r\n\r\n")
    assert answer.field("X-Took") is None
    assert answer.field("Content-Type") == "text/event-stream"


@pytest.mark.parametrize(
    ("start", "closes"),
    [
        ("HTTP/1.1 200 OK\r\nConnection: close", True),
        ("HTTP/1.1 200 OK\r\nconnection:\tTE, Close", True),
        ("HTTP/1.1 200 OK\r\nConnection: keep-alive", False),
        ("HTTP/1.1 200 OK\r\nX-Connection: close", False),
        ("HTTP/1.1 200 OK\r\nX: disclosed", False),
        ("HTTP/1.0 200 OK", True),
    ],
)
async def test_who_closes(start: str, closes: bool) -> None:
    by_hand = ByHand([f"{start}\r\nContent-Length: 1\r\n\r\nx".encode()])
    await by_hand.exchange(b"")
    assert by_hand.wire.aborted is closes


@pytest.mark.parametrize("raw", [whole(b"x") + b"y", chunked(b"x") + b"HTTP/1.1 200 OK\r\n", chunked() + LAST_CHUNK])
async def test_more_than_was_asked_for_ends_the_connection(raw: bytes) -> None:
    by_hand = ByHand([raw])
    await by_hand.exchange(b"")
    assert by_hand.wire.aborted


async def test_arrivals_are_those_of_the_read_that_completed_the_bytes() -> None:
    raw = CHUNKED_HEAD + chunk(b"abc") + chunk(b"defg") + LAST_CHUNK
    for at in range(1, len(raw)):
        answer = await read(raw[:at], raw[at:])
        ends = [raw.index(letter, len(CHUNKED_HEAD)) + 1 for letter in (b"b", b"c\r", b"d", b"g\r")]
        assert answer.arrivals([2, 3, 4, 7]) == [1.0 if end <= at else 2.0 for end in ends], at
