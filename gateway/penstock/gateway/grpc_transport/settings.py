"""What the port's owner says about connections."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.sockets.connection import SocketSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings(SocketSettings):
    """Seconds and bytes."""

    max_message_bytes: int
    compression_level: str = "none"
    max_connections: int = 8192
    message_idle_seconds: float = 60.0
    """Before `message_rate` is asked for, of a message that has begun and of a call's only one."""
    message_rate: float = 1024.0
    """Bytes per second."""
    message_seconds: float = 600.0
    """That a message may take to arrive."""
