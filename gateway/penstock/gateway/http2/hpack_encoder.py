"""Header fields to header blocks, as literals that no table remembers: a block means the same on every connection, so
those that are sent often are made once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hpack.table import HeaderTable

from penstock.gateway.http2.hpack_decoder import Field

FORGET_TABLE = b"\x20"
"""In front of a block: the dynamic table has no room any more. Due when the client allows less than the default."""
_MAX_NAMES = 256
"""Remembered: an answer's names are the server's words, with few exceptions."""
_NAMES = {name: index for index, (name, _) in reversed(list(enumerate(HeaderTable.STATIC_TABLE, 1)))}
_FIELDS = {field: index for index, field in enumerate(HeaderTable.STATIC_TABLE, 1)}


def encode_fields(fields: Iterable[Field]) -> bytes:
    """Names in lower case."""
    return b"".join([_encode(name, value) for name, value in fields])


def _encode(name: bytes, value: bytes) -> bytes:
    whole = _FIELDS.get((name, value))
    if whole is not None:
        return _number(0x80, 0x7F, whole)
    return _name(name) + _string(value)


@lru_cache(_MAX_NAMES)
def _name(name: bytes) -> bytes:
    index = _NAMES.get(name)
    return _number(0, 0x0F, index) if index is not None else b"\0" + _string(name)


def _string(data: bytes) -> bytes:
    return _number(0, 0x7F, len(data)) + data


def _number(flags: int, mask: int, value: int) -> bytes:
    if value < mask:
        return bytes((flags | value,))
    value -= mask
    found = bytearray((flags | mask,))
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
