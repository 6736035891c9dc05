"""Messages out of bytes, their compression, and what the headers of a call say."""

from __future__ import annotations

import gzip
import zlib
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedError
from penstock.gateway.transports.grpc.heads import call_head, end_block
from penstock.gateway.transports.grpc.messages import (
    MessageReader,
    answer_encoding,
    compress,
    compressed,
    decompress,
    decompressed,
    prefix,
)
from penstock.gateway.transports.http2.heads import is_grpc, request_head
from penstock.gateway.transports.http2.hpack import HpackDecoder


@settings(max_examples=60)
@given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=8), st.integers(1, 50), st.booleans())
def test_messages_in_pieces_of_any_size(messages: list[tuple[bytes, bool]], size: int, read_at_once: bool) -> None:
    whole = b"".join([prefix(len(data), compressed=flag) + data for data, flag in messages])
    reader, found = MessageReader(100), []
    for start in range(0, len(whole), size):
        reader.feed(whole[start : start + size])
        while read_at_once and reader.ready():
            found.append(reader.take())
    while reader.ready():
        found.append(reader.take())
    assert [(message.data, message.compressed) for message in found] == messages
    assert reader.size == 0


def test_a_message_that_is_too_long_is_refused_with_its_length() -> None:
    reader = MessageReader(10)
    reader.feed(prefix(10) + b"x" * 10 + prefix(11))
    assert reader.ready()
    reader.take()
    with pytest.raises(PayloadTooLargeError, match=r"11 vs\. 10\), which --http-max-input-size sets"):
        reader.ready()


def test_tiny_pieces_take_no_more_memory_than_large_ones() -> None:
    reader = MessageReader(1 << 20)
    reader.feed(prefix(10_000))
    for _ in range(9_999):
        reader.feed(b"x")
    assert len(reader._pieces) < 100
    reader.feed(b"y")
    assert reader.ready()
    assert reader.take().data == b"x" * 9_999 + b"y"


def test_what_is_no_message() -> None:
    reader = MessageReader(10)
    reader.feed(b"\x02\0\0\0\0")
    with pytest.raises(InvalidRequestError):
        reader.ready()


def test_what_is_missing_is_known_with_the_length() -> None:
    reader = MessageReader(1000)
    reader.feed(prefix(100)[:4])
    assert (reader.ready(), reader.missing) == (False, 0)
    reader.feed(prefix(100)[4:] + b"x")
    assert (reader.ready(), reader.missing) == (False, 99)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_is_compressed_comes_back_whole_and_broken_data_is_refused(encoding: str) -> None:
    data = b"a" * 1000
    packed = compress(data, encoding)  # type: ignore[arg-type]
    assert packed is not None
    assert (gzip.decompress if encoding == "gzip" else zlib.decompress)(packed) == data
    assert decompress(packed, encoding, 1000) == data  # type: ignore[arg-type]
    with pytest.raises(PayloadTooLargeError):
        decompress(packed, encoding, 999)  # type: ignore[arg-type]
    for broken in (packed[:-1], packed + b"x", b"abc", b""):
        with pytest.raises(InvalidRequestError):
            decompress(broken, encoding, 1000)  # type: ignore[arg-type]
    assert compress(b"ab", encoding) is None, "it would be longer"  # type: ignore[arg-type]


def test_a_bomb_is_never_made() -> None:
    bomb = gzip.compress(bytes(50 << 20))
    with pytest.raises(PayloadTooLargeError):
        decompress(bomb, "gzip", 1 << 20)


@pytest.mark.parametrize("size", [100, 5_000, 100_000])
async def test_small_and_large_ones_are_done_in_different_places(size: int) -> None:
    """With the same result."""
    data = b"".join([b"%d" % number for number in range(size)])
    packed = await compressed(data, "gzip")
    assert packed is not None
    assert await decompressed(packed, "gzip", len(data)) == data
    with pytest.raises(PayloadTooLargeError):
        await decompressed(packed, "gzip", len(data) - 1)
    with pytest.raises(InvalidRequestError):
        await decompressed(packed[:-1], "gzip", len(data))


async def test_little_that_becomes_much() -> None:
    bomb = gzip.compress(bytes(3 << 20))
    assert len(bomb) < 4096
    assert len(await decompressed(bomb, "gzip", 3 << 20)) == 3 << 20
    with pytest.raises(PayloadTooLargeError, match="1048576 bytes"):
        await decompressed(bomb, "gzip", 1 << 20)


@pytest.mark.parametrize(
    ("level", "accepted", "encoding"),
    [
        ("none", b"identity,deflate,gzip", "identity"),
        ("low", b"identity,deflate,gzip", "gzip"),
        ("medium", b"identity, deflate, gzip", "deflate"),
        ("high", b"gzip,deflate", "deflate"),
        ("high", b"gzip,br", "gzip"),
        ("high", b"identity", "identity"),
        ("high", None, "identity"),
    ],
)
def test_a_compression_level_chooses_among_what_the_client_accepts(
    level: str, accepted: bytes | None, encoding: str
) -> None:
    assert answer_encoding(level, accepted) == encoding


def head(*fields: tuple[bytes, bytes]):  # type: ignore[no-untyped-def]
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m")]
    return request_head([*pseudo, *fields], 1 << 20, spaces=True)


def test_metadata_reaches_handlers_as_it_was_sent_binary_keys_decoded() -> None:
    found = call_head(
        head(
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"x"),
            (b"key", b"1"),
            (b"key", b"2"),
            (b"a-bin", b"AQL/"),
            (b"a-bin", b"AA==, AQ"),
            (b"name", "Zoë".encode()),
            (b"spaced", b"  a b "),
            (b"old", b"\xff"),
            (b"grpc-accept-encoding", b"gzip"),
        )
    )
    assert found.metadata == (
        ("user-agent", "x"),
        ("key", "1"),
        ("key", "2"),
        ("a-bin", b"\1\2\xff"),
        ("a-bin", b"\0"),
        ("a-bin", b"\1"),
        ("name", "Zoë"),
        ("spaced", "  a b "),
        ("old", "ÿ"),
    )
    assert (found.path, found.timeout, found.encoding, found.accepted) == ("/s/m", None, "identity", b"gzip")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(b"2H", 7200), (b"3M", 180), (b"99999999S", 99_999_999), (b"250m", 0.25), (b"7u", 7e-6), (b"0n", 0)],
)
def test_timeouts_are_read_in_every_unit(given: bytes, seconds: float) -> None:
    assert call_head(head((b"grpc-timeout", given))).timeout == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        (b"grpc-timeout", b"1", InvalidRequestError),
        (b"grpc-timeout", b"100000000S", InvalidRequestError),
        (b"grpc-timeout", b"-1S", InvalidRequestError),
        (b"grpc-timeout", "١S".encode(), InvalidRequestError),
        (b"grpc-encoding", b"snappy", UnsupportedError),
        (b"a-bin", b"=", InvalidRequestError),
        (b"a-bin", b"A", InvalidRequestError),
        (b"a-bin", b"AA==AA", InvalidRequestError),
        (b"a-bin", b"," * 1024, InvalidRequestError),
        (b"grpc-timeout", b"", InvalidRequestError),
        (b"grpc-timeout", b"1s", InvalidRequestError),
        (b"grpc-timeout", b"1 S", InvalidRequestError),
        (b"grpc-timeout", b"1.5S", InvalidRequestError),
        (b"grpc-encoding", b"", UnsupportedError),
        (b"grpc-encoding", b"\xff" * 1000, UnsupportedError),
    ],
)
def test_heads_that_are_refused(name: bytes, value: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        call_head(head((name, value)))


def test_content_types() -> None:
    for kind, expected in (
        (b"application/grpc", True),
        (b"application/grpc+proto", True),
        (b"application/grpcx", False),
    ):
        assert is_grpc(head((b"content-type", kind))) is expected
    assert not is_grpc(head())


def test_ends_are_percent_encoded() -> None:
    fields = HpackDecoder(1 << 16).decode(end_block(3, "50% Zoë\nend\ud800", (("x-request-id", "7"), ("a-bin", b"\1"))))
    assert fields == [
        (b"grpc-status", b"3"),
        (b"grpc-message", b"50%25 Zo%C3%AB%0Aend?"),
        (b"x-request-id", b"7"),
        (b"a-bin", b"AQ"),
    ]


def test_long_messages_of_a_status_are_cut_between_characters() -> None:
    """Clients refuse more than 8 KiB of metadata."""
    for details in ("x" * 4096, "é" * 682, "% " * 1023 + "x"):
        (_, (_, written)) = HpackDecoder(1 << 16).decode(end_block(3, details, ()))
        assert unquote(written.decode()) == details
    for character in "xé€😀%":
        (_, (_, written)) = HpackDecoder(1 << 16).decode(end_block(3, "a" + character * 70_000, ()))
        assert 4_000 < len(written) <= 4096 + 3
        assert (
            unquote(written.decode(), errors="strict")
            == "a" + character * (unquote(written.decode()).count(character)) + "..."
        )


def test_a_message_neither_begins_nor_ends_with_a_space() -> None:
    (_, (_, written)) = HpackDecoder(1 << 16).decode(end_block(3, " a b ", ()))
    assert written == b"%20a b%20"
