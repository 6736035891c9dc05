"""Bounds on what a client may make one connection cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.http2.errors import ConnectionFault, ErrorCode
from penstock.gateway.http2.pings import PingRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    max_streams: int = 1024
    """At one time. Further ones are refused; clients know this number from the settings."""
    max_header_list_bytes: int = 16 << 10
    """Of one request's decoded headers, counted as in RFC 9113, 6.5.2. What is above it, but below four times as much,
    is handed on as too large, so that it can be answered; what is above that ends the connection."""
    stream_window: int = 64 << 10
    """Bytes that a client may send on a stream before something of it is read. Not less than the default of 65,535: it
    may send so many before it knows better."""
    connection_window: int = 16 << 20
    """The same on the connection, more than the default. It is given back as bytes arrive: what bounds memory are the
    streams' windows."""
    resets: int = 2048
    """Streams that a client may open and give up at once, above those that are answered."""
    resets_per_second: float = 100.0
    settings: int = 100
    settings_per_second: float = 10.0
    idle_frames: int = 10_000
    """Frames at once that bring no request further: pings, empty data, window updates, frames for streams that are
    over. Requests and data earn more."""
    idle_frames_per_second: float = 1000.0
    max_unsent_bytes: int = 256 << 10
    """Of frames that wait for a client which does not read. Data waits in its stream instead."""
    pings: PingRules = field(default_factory=PingRules)

    @property
    def most_header_list_bytes(self) -> int:
        return 4 * self.max_header_list_bytes

    @property
    def max_header_block_bytes(self) -> int:
        """Encoded. Fields that are not compressed are no longer than what is counted of them when decoded."""
        return self.most_header_list_bytes


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
