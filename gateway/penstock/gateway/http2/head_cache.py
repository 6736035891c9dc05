"""The heads of requests, from header blocks that are mostly the same."""

from __future__ import annotations

from penstock.gateway.http2.fields import RequestHead, request_head
from penstock.gateway.http2.hpack_decoder import Field, HpackDecoder
from penstock.gateway.http2.recent import Recent

_MAX_BLOCK_BYTES = 512


class HeadReader:
    """A client's second request of a kind is usually a block of indexes, and that block then comes with every request.

    What such a block means depends on the dynamic table. A block may be remembered if it has not changed the table, and
    everything that is remembered is forgotten as soon as another block does: so the table is the same at every look-up
    as it was when the block was decoded.
    """

    def __init__(self, max_list_bytes: int, most_list_bytes: int, *, spaces: bool = False) -> None:
        """`spaces`: whether values may begin and end with them."""
        self._decoder = HpackDecoder(most_list_bytes)
        self._max_list_bytes = max_list_bytes
        self._spaces = spaces
        self._seen: Recent[bytes, RequestHead] = Recent()

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
        head = request_head(self.fields(block), self._max_list_bytes, spaces=self._spaces)
        if self._decoder.changes == before and len(block) <= _MAX_BLOCK_BYTES:
            self._seen.keep(block, head, head.size)
        return head
