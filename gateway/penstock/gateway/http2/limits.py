"""Bounds on what a client may make one connection cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.http2.pings import PingRules


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
