"""The heads of requests, from header blocks that are mostly the same."""

from __future__ import annotations

from penstock.gateway.http2.fields import RequestHead, request_head
from penstock.gateway.http2.hpack_decoder import Field, HpackDecoder

_MOST = 32
_MAX_BLOCK_BYTES = 1024
_MAX_HEAD_BYTES = 4096
"""What one connection keeps is bounded by 32 of these."""


class HeadReader:
    """A client's second request of a kind is usually a block of indexes, and that block then comes with every request.

    What such a block means depends on the dynamic table. A block may be remembered if it has not changed the table, and
    everything that is remembered is forgotten as soon as another block does: so the table is the same at every look-up
    as it was when the block was decoded.
    """

    def __init__(self, max_list_bytes: int, most_list_bytes: int) -> None:
        self._decoder = HpackDecoder(most_list_bytes)
        self._max_list_bytes = max_list_bytes
        self._seen: dict[bytes, RequestHead] = {}

    def fields(self, block: bytes) -> list[Field]:
        """Of trailers, or of what is ignored. Raises ConnectionFault."""
        before = self._decoder.changes
        try:
            return self._decoder.decode(block)
        finally:
            if self._decoder.changes != before:
                self._seen.clear()

    def head(self, block: bytes) -> RequestHead:
        """Raises ConnectionFault, and StreamFault for a head that is malformed."""
        found = self._seen.get(block)
        if found is not None:
            return found
        before = self._decoder.changes
        head = request_head(self.fields(block), self._max_list_bytes)
        small = len(block) <= _MAX_BLOCK_BYTES and head.size <= _MAX_HEAD_BYTES
        if self._decoder.changes == before and small:
            if len(self._seen) == _MOST:
                del self._seen[next(iter(self._seen))]
            self._seen[block] = head
        return head
