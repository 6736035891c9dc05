"""Which streams there have been."""

from __future__ import annotations

from array import array
from collections import deque

from penstock.gateway.http2.errors import ConnectionFault, ErrorCode, protocol_error

MAX_STREAM_ID = 2**31 - 1
_REMEMBERED = 2048
_SKIPS = 16


class StreamNumbers:
    def __init__(self) -> None:
        self.last = 0
        """The highest so far."""
        self._skipped: deque[range] = deque(maxlen=_SKIPS)
        self.accepted = MAX_STREAM_ID
        """The highest that the client may still open, as it has been told."""
        self._left = array("I")
        """In the order in which they were left; four bytes each, since clients can make any connection remember all."""

    def opened(self, stream_id: int) -> None:
        """Those between it and the last one will never be (RFC 9113, 5.1.1)."""
        if stream_id > self.last + 2:
            self._skipped.append(range(self.last + 1, stream_id))
        self.last = stream_id

    def leave(self, stream_id: int) -> None:
        """The stream has ended here before the client has ended it: it may not know yet."""
        self._left.append(stream_id)
        if len(self._left) > _REMEMBERED:
            del self._left[0]

    def left(self, stream_id: int) -> bool:
        return stream_id in self._left

    def ended_by_client(self, stream_id: int) -> None:
        """Nothing more comes for a stream that was left."""
        if stream_id in self._left:
            self._left.remove(stream_id)

    def wrong(self, stream_id: int, *, opening: bool = False) -> ConnectionFault:
        """For a frame that no client has reason to send. `opening`: it would open the stream, were it a new one."""
        if stream_id > self.last:
            return protocol_error("a frame is for a stream that was never opened")
        if opening and any(stream_id in skipped for skipped in self._skipped):
            return protocol_error("a frame is for a stream that was skipped")
        return ConnectionFault(ErrorCode.STREAM_CLOSED, "a frame is for a stream that is over")
