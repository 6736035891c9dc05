"""How many responses of a stream may be on their way, or unread in the front: what bounds its memory. Plain data.

The host counts what it sends, the front what its reader has taken, both in the same way. The host stops at a window of
responses or bytes; the front reports by halves of it. So a host that has stopped always hears of it when the reader has
taken everything.
"""

from __future__ import annotations

MAX_RESPONSES = 32
MAX_BYTES = 4 << 20
"""Of tensors. A response may be larger: then it is the only one on its way."""


class SendWindow:
    """The host's side of one stream."""

    __slots__ = ("_bytes", "_responses")

    def __init__(self) -> None:
        self._responses = 0
        self._bytes = 0

    @property
    def open(self) -> bool:
        """Whether one more response may leave."""
        return self._responses < MAX_RESPONSES and self._bytes < MAX_BYTES

    def sent(self, size: int) -> None:
        """A response with `size` bytes of tensors."""
        self._responses += 1
        self._bytes += size

    def taken(self, responses: int, size: int) -> None:
        """The front's report."""
        self._responses = max(0, self._responses - responses)
        self._bytes = max(0, self._bytes - size)


class ReadWindow:
    """The front's side of the same stream."""

    __slots__ = ("_bytes", "_responses")

    def __init__(self) -> None:
        self._responses = 0
        self._bytes = 0

    def take(self, size: int) -> tuple[int, int] | None:
        """The reader has taken a response of this size. What is to be reported now: responses and bytes."""
        self._responses += 1
        self._bytes += size
        if self._responses < MAX_RESPONSES // 2 and self._bytes < MAX_BYTES // 2:
            return None
        report = self._responses, self._bytes
        self._responses = self._bytes = 0
        return report
