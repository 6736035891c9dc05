"""What a client has left of what it may cost a connection without bringing a request further."""

from __future__ import annotations

from penstock.gateway.http2.errors import ConnectionFault, ErrorCode
from penstock.gateway.http2.limits import Http2Limits
from penstock.gateway.http2.streams import Stream

_EARNED_BY_REQUEST = 8
_EARNED_BY_DATA = 3
_EARNED_BYTES = 1024
"""What is sent earns frames without use, by calls and by bytes. Into how many frames the client's windows cut it earns
nothing."""


class Allowance:
    """What may happen at once, and so often per second on average."""

    def __init__(self, most: float, per_second: float, now: float, text: str) -> None:
        """`text` is what the client is told when it has used all of it."""
        self._most = self._left = most
        self._per_second = per_second
        self._seen = now
        self._text = text

    def earn(self, amount: float) -> None:
        self._left = min(self._most, self._left + amount)

    def spend(self, now: float) -> None:
        """Raises ConnectionFault."""
        self._left -= 1
        if self._left < 0:
            self.earn((now - self._seen) * self._per_second)
            self._seen = now
            if self._left < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, self._text)


class Bounds:
    """All of its methods that count against the client raise ConnectionFault when it has nothing left."""

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self.now = now
        """Of the bytes that are being looked at."""
        self._early = limits.early_seconds
        self._in_vain = Allowance(limits.resets, limits.resets_per_second, now, "too many streams are given up")
        self._idle = Allowance(limits.idle_frames, limits.idle_frames_per_second, now, "too many frames without use")
        self._settings = Allowance(limits.settings, limits.settings_per_second, now, "too many settings")

    def without_use(self) -> None:
        """A frame that brings no request further."""
        self._idle.spend(self.now)

    def settings(self) -> None:
        self._settings.spend(self.now)

    def fault(self) -> None:
        """A stream ends because the client broke a rule. What it had started was in vain, too."""
        self._in_vain.spend(self.now)

    def given_up(self, stream: Stream) -> None:
        """By the client."""
        if not stream.answered and self.now - stream.opened < self._early:
            self._in_vain.spend(self.now)

    def request(self) -> None:
        self._idle.earn(_EARNED_BY_REQUEST)

    def sent(self, size: int) -> None:
        """Data."""
        self._idle.earn(_EARNED_BY_DATA + size / _EARNED_BYTES)

    def answered(self) -> None:
        """A stream has got its whole answer."""
        self._in_vain.earn(1)
