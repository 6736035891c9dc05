"""What the port's owner says about connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Seconds and bytes. Those that gRPC knows mean what they mean in its library."""

    max_message_bytes: int
    compression_level: str = "none"
    keepalive_time: float = 7200.0
    """Of silence, after which the client is asked whether it is there."""
    keepalive_timeout: float = 20.0
    keepalive_without_calls: bool = False
    max_pings_without_data: int = 2
    """Pings in a row, while nothing else is sent; 0: any number."""
    max_age: float | None = None
    """Then the client is asked to open another connection. A tenth is added or taken away at random, so that clients
    that came together do not all return together."""
    max_age_grace: float | None = None
    """That calls get then; None: as long as they take."""
    max_connections: int = 8192
    start_seconds: float = 10.0
    """From connecting to the client's first settings."""
    frame_seconds: float = 10.0
    """Without any byte of a frame or header block that has begun."""
    whole_frame_seconds: float = 60.0
    """From its first byte to its last."""
    message_idle_seconds: float = 60.0
    """Before `message_rate` is asked for, of a message that has begun and of a call's only one."""
    message_rate: float = 1024.0
    """Bytes per second."""
    message_seconds: float = 600.0
    """That a message may take to arrive."""
    send_seconds: float = 60.0
    """Without any byte taken by a client while output waits for it."""
    stream_seconds: float = 600.0
    """Without any byte of one stream taken, while others may be."""
