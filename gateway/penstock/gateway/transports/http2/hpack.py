"""Header fields and their blocks (HPACK, RFC 7541).

Blocks are written as literals that no table remembers: a block means the same on every connection, so those that are
sent often are made once. They are read with the tables and the Huffman code of the `hpack` package. Its decoder is not
used: numbers have no bound there, and what a block did to the dynamic table cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hpack.exceptions import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from penstock.gateway.transports.http2.frames import ConnectionFault, Http2ErrorCode

Field = tuple[bytes, bytes]

FIELD_OVERHEAD = 32
"""What a field counts beside its name and value, in tables and lists."""
_TABLE_BYTES = 4096
_STATIC = tuple(HeaderTable.STATIC_TABLE)
_MAX_NUMBER_BYTES = 5
"""Behind the prefix: enough for 2^32."""
_MAX_RESIZES = 16
"""In front of a block. Two are enough (RFC 7541, 4.2); some encoders report each change of a setting."""


class HpackDecoder:
    """Its table follows all blocks of a connection, so every block must be decoded, in order."""

    def __init__(self, max_list_bytes: int) -> None:
        self._table = HeaderTable()
        self._max_list_bytes = max_list_bytes
        self.changes = 0
        """To the dynamic table, so far. Between two equal numbers the same bytes mean the same fields."""

    def decode(self, block: bytes) -> list[Field]:
        """Raises ConnectionFault: the table cannot be trusted after a block that cannot be decoded."""
        try:
            return self._decode(block)
        except (IndexError, HPACKError):
            raise ConnectionFault(Http2ErrorCode.COMPRESSION_ERROR, "a header block cannot be decoded") from None

    def _decode(self, block: bytes) -> list[Field]:
        fields: list[Field] = []
        position, end, size, resizes = 0, len(block), 0, 0
        while position < end:
            first = block[position]
            if first & 0x80:
                index, position = _number(block, position, 0x7F)
                field = self._entry(index)
            elif first & 0x40:
                field, position = self._literal(block, position, 0x3F)
                self._table.add(*field)
                self.changes += 1
            elif first & 0x20:
                resizes += 1
                if fields or resizes > _MAX_RESIZES:
                    raise IndexError
                position = self._resize(block, position)
                continue
            else:
                field, position = self._literal(block, position, 0x0F)
            fields.append(field)
            size += len(field[0]) + len(field[1]) + FIELD_OVERHEAD
            if size > self._max_list_bytes:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large")
        return fields

    def _entry(self, index: int) -> Field:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        field: Field = self._table.get_by_index(index)
        return field

    def _literal(self, block: bytes, position: int, mask: int) -> tuple[Field, int]:
        index, position = _number(block, position, mask)
        if index:
            name = self._entry(index)[0]
        else:
            name, position = _string(block, position)
        value, position = _string(block, position)
        return (name, value), position

    def _resize(self, block: bytes, position: int) -> int:
        size, position = _number(block, position, 0x1F)
        if size > _TABLE_BYTES:
            raise IndexError
        self._table.maxsize = size
        self.changes += 1
        return position


def _number(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Raises IndexError at the block's end, and for numbers that nothing here can be."""
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    for index in range(_MAX_NUMBER_BYTES):
        byte = block[position + index]
        value += (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise IndexError


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    huffman = block[position] & 0x80
    length, position = _number(block, position, 0x7F)
    end = position + length
    if end > len(block):
        raise IndexError
    data = block[position:end]
    return (bytes(decode_huffman(data)) if huffman else data), end


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
        return _encoded_number(0x80, 0x7F, whole)
    return _name(name) + _encoded_string(value)


@lru_cache(_MAX_NAMES)
def _name(name: bytes) -> bytes:
    index = _NAMES.get(name)
    return _encoded_number(0, 0x0F, index) if index is not None else b"\0" + _encoded_string(name)


def _encoded_string(data: bytes) -> bytes:
    return _encoded_number(0, 0x7F, len(data)) + data


def _encoded_number(flags: int, mask: int, value: int) -> bytes:
    if value < mask:
        return bytes((flags | value,))
    value -= mask
    encoded = bytearray((flags | mask,))
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
