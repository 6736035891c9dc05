"""RFC 7541: its own examples, the `hpack` package as the judge, what is broken, and what is remembered."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.transports.http2.frames import ConnectionFault, Http2ErrorCode, StreamFault
from penstock.gateway.transports.http2.heads import HeadReader
from penstock.gateway.transports.http2.hpack import HpackDecoder, encode_fields

LIST_BYTES = 4096
PLAIN = (
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
)
HUFFMAN = (
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
)
DECODED = [
    [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")],
    [
        (b":method", b"GET"),
        (b":scheme", b"http"),
        (b":path", b"/"),
        (b":authority", b"www.example.com"),
        (b"cache-control", b"no-cache"),
    ],
    [
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":path", b"/index.html"),
        (b":authority", b"www.example.com"),
        (b"custom-key", b"custom-value"),
    ],
]


@pytest.mark.parametrize("blocks", [PLAIN, HUFFMAN], ids=["plain", "huffman"])
def test_requests_of_the_rfc(blocks: tuple[str, ...]) -> None:
    """Appendix C.3 and C.4: three requests on one connection."""
    decoder = HpackDecoder(LIST_BYTES)
    assert [decoder.decode(bytes.fromhex(block)) for block in blocks] == DECODED


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [(b"custom-key", b"custom-header")]),
        ("040c2f73616d706c652f70617468", [(b":path", b"/sample/path")]),
        ("100870617373776f726406736563726574", [(b"password", b"secret")]),
        ("82", [(b":method", b"GET")]),
        ("3fe11f82", [(b":method", b"GET")]),
        ("20203f0182", [(b":method", b"GET")]),
    ],
)
def test_representations_of_the_rfc(block: str, fields: list[tuple[bytes, bytes]]) -> None:
    """Appendix C.2, and changes of the table's size in front of a block."""
    assert HpackDecoder(LIST_BYTES).decode(bytes.fromhex(block)) == fields


@pytest.mark.parametrize(
    "block",
    [
        "80",  # index 0
        "be",  # an entry that is not there
        "ff" + "ff" * 4 + "7f",  # a huge index
        "ff" + "80" * 10 + "01",  # a number that does not end
        "ff" + "ff" * 16_000,  # the same, long
        "40",  # cut
        "4005616263",
        "400161",
        "0085" + "ff" * 5,  # Huffman: end-of-string within
        "00810000",  # Huffman: padding that is none
        "3fe21f",  # a table above 4096
        "8220",  # a size behind a field
        "20" * 17 + "82",  # more changes of the size than any encoder has reason for
    ],
)
def test_broken_blocks(block: str) -> None:
    with pytest.raises(ConnectionFault) as caught:
        HpackDecoder(LIST_BYTES).decode(bytes.fromhex(block))
    assert caught.value.code is Http2ErrorCode.COMPRESSION_ERROR


def test_a_small_block_of_a_large_list_is_refused_on_the_way() -> None:
    decoder = HpackDecoder(LIST_BYTES)
    value = b"v" * 1000
    decoder.decode(b"\x40\x01a\x7f\xe9\x06" + value)
    with pytest.raises(ConnectionFault) as caught:
        decoder.decode(b"\xbe" * 30_000)
    assert caught.value.code is Http2ErrorCode.ENHANCE_YOUR_CALM


TEXT = st.one_of(
    st.sampled_from([b":path", b":method", b"POST", b"te", b"a", b"grpc-timeout", b"content-type", b"", b"x" * 300]),
    st.binary(max_size=40),
)
FIELDS = st.lists(st.tuples(TEXT, TEXT), max_size=6)


@settings(max_examples=60)
@given(lists=st.lists(FIELDS, max_size=8), huffman=st.booleans(), sizes=st.lists(st.integers(0, 4096), max_size=8))
def test_what_another_encoder_writes(lists: list[list[tuple[bytes, bytes]]], huffman: bool, sizes: list[int]) -> None:
    """With a dynamic table whose size changes."""
    encoder, decoder = hpack.Encoder(), HpackDecoder(1 << 20)
    for index, fields in enumerate(lists):
        if index < len(sizes):
            encoder.header_table_size = sizes[index]
        assert decoder.decode(encoder.encode(fields, huffman=huffman)) == fields


@settings(max_examples=60)
@given(FIELDS)
def test_what_another_decoder_reads(fields: list[tuple[bytes, bytes]]) -> None:
    assert list(hpack.Decoder().decode(encode_fields(fields), raw=True)) == fields
    assert HpackDecoder(1 << 20).decode(encode_fields(fields)) == fields


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_mean_the_same_to_both(blocks: list[bytes]) -> None:
    ours, theirs = HpackDecoder(64 << 10), hpack.Decoder()
    for block in blocks:
        try:
            expected = list(theirs.decode(block, raw=True))
        except hpack.HPACKError:
            with pytest.raises(ConnectionFault):
                ours.decode(block)
            return
        assert ours.decode(block) == expected


REQUEST = ((":method", "POST"), (":scheme", "http"), (":path", "/a"), ("n", "1"))


def test_a_remembered_head_is_forgotten_when_the_table_changes() -> None:
    encoder, reader = hpack.Encoder(), HeadReader(LIST_BYTES, LIST_BYTES)
    first = encoder.encode(REQUEST)
    again = encoder.encode(REQUEST)
    assert first != again
    head = reader.head(first)
    assert reader.head(again) == head
    assert reader.head(again) is reader.head(again)
    encoder.encode([("m", "2")])  # a new entry moves all others: the same indexes mean something else
    reader.fields(b"\x40\x01m\x012")
    moved = encoder.encode(REQUEST)
    assert moved != again
    assert reader.head(moved) == head
    with pytest.raises(StreamFault):
        reader.head(again)


def test_a_block_that_changes_the_table_is_never_remembered() -> None:
    """It adds an entry each time, which moves the others: the third one is there only if all three were decoded."""
    reader = HeadReader(LIST_BYTES, LIST_BYTES)
    start = b"\x83\x86\x04\x02/a"
    adds = start + b"\x40\x01n\x011"
    for _ in range(3):
        reader.head(adds)
    assert reader.head(start + b"\xc0").fields == ((b"n", b"1"),)
    with pytest.raises(ConnectionFault):
        reader.head(start + b"\xc1")


def test_a_size_in_front_of_a_block_empties_the_table_each_time() -> None:
    reader = HeadReader(LIST_BYTES, LIST_BYTES)
    start = b"\x83\x86\x04\x02/a"
    resizes = b"\x20\x3f\xe1\x1f" + start
    reader.head(resizes)
    reader.head(start + b"\x40\x01n\x011")
    reader.head(resizes)
    with pytest.raises(ConnectionFault):
        reader.head(start + b"\xbe")


def test_what_is_remembered_is_bounded() -> None:
    """8 KiB of heads; each of these has 274 bytes."""
    reader = HeadReader(LIST_BYTES, LIST_BYTES)
    start = [(k.encode(), v.encode()) for k, v in REQUEST]
    blocks = [encode_fields([*start, (b"i", b"%02d" % i + bytes(b"x" * 80))]) for i in range(100)]
    heads = [reader.head(block) for block in blocks]
    assert heads[0].size == 274
    assert [reader.head(blocks[index]) is heads[index] for index in (99, 71, 70)] == [True, True, False]
    large = encode_fields([*((k.encode(), v.encode()) for k, v in REQUEST), (b"i", b"x" * 2000)])
    assert reader.head(large) is not reader.head(large)
