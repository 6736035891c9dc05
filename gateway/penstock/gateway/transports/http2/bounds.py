"""Limits of a connection, and what a client has left of what it may cost without bringing a request further."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.gateway.transports.http2.frames import ConnectionFault, Http2ErrorCode
from penstock.gateway.transports.http2.streams import OpenStream

_IDLE_SECONDS = 7200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PingRules:
    min_seconds: float = 300.0
    """Between two pings, while nothing is sent to the client."""
    max_strikes: int = 2
    """Pings that come too early before the connection ends; 0: any number."""
    allowed_when_idle: bool = False
    """Without a stream, the least time between two pings is two hours if this is not set."""


class PingJudge:
    def __init__(self, rules: PingRules) -> None:
        self._rules = rules
        self._strikes = 0
        self._last = -math.inf

    def sent(self) -> None:
        """Headers or data have been sent since: a client may ask whether they could be sent faster."""
        self._strikes = 0
        self._last = -math.inf

    def received(self, now: float, *, idle: bool) -> None:
        """Raises ConnectionFault. `idle`: the connection has no stream."""
        rules = self._rules
        least = _IDLE_SECONDS if idle and not rules.allowed_when_idle else rules.min_seconds
        early = now < self._last + least
        self._last = now
        if early:
            self._strikes += 1
            if self._strikes > rules.max_strikes > 0:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    max_streams: int = 1024
    """At one time. Further ones are refused; clients know this number from the settings."""
    max_header_list_bytes: int = 16 << 10
    """Of one request's decoded headers, counted as in RFC 9113, 6.5.2. What is above it, but below twice as much,
    is handed on as too large, so that it can be answered; what is above that ends the connection."""
    spaces_in_values: bool = False
    """Whether the values of header fields may begin and end with spaces, which only gRPC lets them."""
    stream_window: int = 64 << 10
    """Bytes that a client may send on a stream before something of it is read. Not less than the default of 65,535: it
    may send so many before it knows better."""
    connection_window: int = 16 << 20
    """The same on the connection, more than the default. It is given back as bytes arrive: what bounds memory are the
    streams' windows."""
    resets: int = 2048
    """Streams that a client may open in vain at once: it breaks a rule on them, or gives them up within `early_seconds`
    and before anything of an answer was sent. Each stream that is answered earns one. Streams that are given up later
    cost nothing here: `max_streams` bounds how many of them there can be in a second."""
    resets_per_second: float = 100.0
    early_seconds: float = 0.1
    settings: int = 100
    settings_per_second: float = 10.0
    idle_frames: int = 10_000
    """Frames at once that bring no request further: pings, window updates, frames for streams that are over, data of
    less than `small_data` bytes. Requests and data earn more."""
    idle_frames_per_second: float = 1000.0
    small_data: int = 16
    max_unsent_bytes: int = 256 << 10
    """Of frames that wait for a client which does not read. Data waits in its stream instead. Above this, nothing more
    should be read from the client, and an answer to a ping or to settings ends the connection."""
    pings: PingRules = field(default_factory=PingRules)

    @property
    def most_header_list_bytes(self) -> int:
        return 2 * self.max_header_list_bytes

    @property
    def max_header_block_bytes(self) -> int:
        """Encoded. Fields that are not compressed are no longer than what is counted of them when decoded."""
        return self.most_header_list_bytes


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
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, self._text)


class ConnectionBounds:
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

    def given_up(self, stream: OpenStream) -> None:
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
