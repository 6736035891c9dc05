"""What the port's owner says about its connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketSettings:
    """Seconds. Those that gRPC knows mean what they mean in its library."""

    keepalive_time: float = 7200.0
    """Of silence, after which the client is asked whether it is there."""
    keepalive_timeout: float = 20.0
    keepalive_without_calls: bool = False
    """Also while none of the client's requests runs."""
    max_pings_without_data: int = 2
    """Pings in a row, while nothing else is sent; 0: any number."""
    max_age: float | None = None
    """Then the client is asked to open another connection. A tenth is added or taken away at random, so that clients
    that came together do not all return together."""
    max_age_grace: float | None = None
    """That requests get then; None: as long as they take."""
    start_seconds: float = 10.0
    """From connecting to the client's first settings."""
    frame_seconds: float = 10.0
    """Without any byte of a frame or header block that has begun."""
    whole_frame_seconds: float = 60.0
    """From its first byte to its last."""
    send_seconds: float = 60.0
    """Without any byte taken by a client while output waits for it."""
    stream_seconds: float = 600.0
    """Without any byte of one stream taken, while others may be."""
