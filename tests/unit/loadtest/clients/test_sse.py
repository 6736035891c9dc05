"""Server-sent events, and when they had arrived."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.loadtest.clients.response import events
from unit.loadtest.clients.wires import CHUNKED_HEAD, LAST_CHUNK, ByHand, chunk, chunked, whole

MIXED = (
    b'\xef\xbb\xbfdata: {"n":1}\n\n: keep-alive\r\n\r\nevent: delta\r\ndata: {"n":\r\ndata:2}\r\n\r\n\n\n'
    b"id: 7\nretry: 10\n\ndata\n\ndata:three\r\rdata: four\nid: 8\n\ndata: cut off"
)
MIXED_DATA = [b'{"n":1}', b'{"n":\n2}', b"three", b"four"]


async def parsed(*reads: bytes) -> list[tuple[float, bytes]]:
    return list(events(await ByHand(reads).exchange(b"")))


def data(found: Sequence[tuple[float, bytes]]) -> list[bytes]:
    return [text for _, text in found]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"data: 1\n\ndata: 2\n\n", [b"1", b"2"]),
        (b"data: 1\r\n\r\ndata: 2\r\n\r\n", [b"1", b"2"]),
        (b"data: 1\r\rdata: 2\r\r", [b"1", b"2"]),
        (b"data:1\n\ndata:  2\n\n", [b"1", b" 2"]),
        (b"data: 1\ndata: 2\n\n", [b"1\n2"]),
        (b"data: 1\r\ndata: 2\r\n\r\n", [b"1\n2"]),
        (b": ping\n\n:\n\ndata: 1\n\n", [b"1"]),
        (b"event: x\ndata: 1\nid: 3\n\n", [b"1"]),
        (b"\n\n\ndata: 1\n\n\n\n\ndata: 2\n\n", [b"1", b"2"]),
        (b"data: 1\n\ndata: 2\n", [b"1"]),
        (b"data: 1\n\ndata: 2", [b"1"]),
        (b"", []),
        (MIXED, MIXED_DATA),
    ],
)
async def test_events_are_read_with_every_line_end_and_comments_are_not(body: bytes, expected: list[bytes]) -> None:
    assert data(await parsed(chunked(body) if body else chunked())) == expected
    assert data(await parsed(whole(body))) == expected


async def test_events_may_be_split_anywhere() -> None:
    raw = chunked(MIXED[:50], MIXED[50:])
    for at in range(1, len(raw)):
        assert data(await parsed(raw[:at], raw[at:])) == MIXED_DATA


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
async def test_an_event_arrives_with_the_read_that_has_its_empty_line(line: bytes) -> None:
    texts = [b"data: one" + line, line + b"data: two" + line + line, b": comment" + line + line, b"data: three"]
    reads = [CHUNKED_HEAD, *map(chunk, texts), chunk(line + line), LAST_CHUNK]
    assert await parsed(*reads) == [(3.0, b"one"), (3.0, b"two"), (6.0, b"three")]


async def test_bytes_one_by_one() -> None:
    raw = chunked(b"data: 1\n\n", b"data: 2\n\n")
    found = await parsed(*(raw[at : at + 1] for at in range(len(raw))))
    first, second = raw.index(b"1\n\n") + 3, raw.index(b"2\n\n") + 3
    assert found == [(float(first), b"1"), (float(second), b"2")]
