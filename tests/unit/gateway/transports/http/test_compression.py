"""Compressed bodies, within bounds."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.errors import HttpError
from penstock.gateway.requests.intake import SMALL_BODY
from penstock.gateway.transports.http import compression
from penstock.gateway.transports.http.compression import accepted_coding, compress, content_coding, decompress

DATA = b"tensor" * 1000


@pytest.mark.parametrize(
    ("header", "coding"),
    [(None, b""), (b"", b""), (b"identity", b""), (b"gzip", b"gzip"), (b" GZIP ", b"gzip"), (b"deflate", b"deflate")],
)
def test_content_codings(header: bytes | None, coding: bytes) -> None:
    assert content_coding(header) == coding


@pytest.mark.parametrize("header", [b"br", b"zstd", b"gzip, gzip", b"x-gzip", b"chunked"])
def test_unknown_codings_are_refused(header: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        content_coding(header)
    assert caught.value.shape.status == 415


def test_both_codings_are_read() -> None:
    assert decompress(b"gzip", gzip.compress(DATA), len(DATA)) == DATA
    assert decompress(b"deflate", zlib.compress(DATA), len(DATA)) == DATA


def test_both_codings_are_written() -> None:
    assert gzip.decompress(compress(b"gzip", [DATA[:5], DATA[5:]])) == DATA
    assert zlib.decompress(compress(b"deflate", [DATA])) == DATA


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"plain",
        pytest.param(gzip.compress(DATA)[:-9], id="no checksum"),  # a name of its own: the data holds the time
        pytest.param(gzip.compress(DATA)[:-1], id="a byte short"),
        pytest.param(gzip.compress(DATA) + b"x", id="a byte more"),
        zlib.compress(DATA),
    ],
)
def test_broken_data_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decompress(b"gzip", body, 1 << 20)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 50))
def test_whatever_was_compressed_comes_back(parts: list[bytes], piece: int, fed: int) -> None:
    """Whatever the steps, and in however many members."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "_PIECE", piece)
        patch.setattr(compression, "_FED", fed)
        whole = b"".join(parts)
        packed = b"".join(map(gzip.compress, parts))
        assert decompress(b"gzip", packed, len(whole)) == whole
        assert decompress(b"deflate", zlib.compress(whole), len(whole)) == whole
        if whole:
            with pytest.raises(PayloadTooLargeError):
                decompress(b"gzip", packed, len(whole) - 1)


@given(st.sampled_from([b"gzip", b"deflate"]), st.binary(max_size=100), st.data())
def test_what_is_not_whole_is_refused(coding: bytes, text: bytes, data: st.DataObject) -> None:
    packed = gzip.compress(text) if coding == b"gzip" else zlib.compress(text)
    short = packed[: data.draw(st.integers(0, len(packed) - 1))]
    longer = packed + data.draw(st.binary(min_size=1, max_size=15))
    for body in (short, longer):
        with pytest.raises(InvalidRequestError):
            decompress(coding, body, 1 << 20)


def test_what_is_held_grows_with_what_comes() -> None:
    held: list[int] = []
    size = SMALL_BODY + 3 * (1 << 20)
    decompress(b"gzip", gzip.compress(bytes(size)), size, held.append)
    assert sum(held) == size - SMALL_BODY
    assert max(held) <= 1 << 20
    held.clear()
    decompress(b"gzip", gzip.compress(bytes(SMALL_BODY)), size, held.append)
    assert held == []


def test_members_are_counted() -> None:
    empty = gzip.compress(b"")
    assert decompress(b"gzip", empty * 4096, 10) == b""
    with pytest.raises(InvalidRequestError, match="4096 gzip members"):
        decompress(b"gzip", empty * 4097, 10)


def test_a_bomb_is_cut_off_at_the_limit() -> None:
    limit = 1 << 20
    bomb = gzip.compress(bytes(limit * 64))
    tracemalloc.start()
    with pytest.raises(PayloadTooLargeError):
        decompress(b"gzip", bomb, limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * limit
    assert decompress(b"gzip", gzip.compress(bytes(limit)), limit) == bytes(limit)


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (None, b""),
        (b"", b""),
        (b"gzip", b"gzip"),
        (b"gzip, deflate", b"gzip"),
        (b"deflate, gzip", b"gzip"),
        (b"Deflate;q=1, gzip;q=0.1", b"deflate"),
        (b"deflate; q=0.5", b"deflate"),
        (b"gzip;q=0", b""),
        (b"identity, gzip;q=0.5", b""),
        (b"identity;q=0.5, gzip", b"gzip"),
        (b"br", b""),
        (b"gzip;q=nan", b""),
        (b"gzip;q=2", b""),
        (b"," * 5000 + b"gzip", b""),
    ],
)
def test_accepted_codings(header: bytes | None, coding: bytes) -> None:
    assert accepted_coding(header) == coding
