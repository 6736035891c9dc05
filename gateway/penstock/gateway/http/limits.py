"""Bounds on what one connection may cost before a handler has seen it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int = 8192
    """As many requests may run on all HTTP/2 connections together, too."""
    max_streams: int = 1024
    """Requests at a time on one HTTP/2 connection."""
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    """Names and values of one request together."""
    max_uri_bytes: int = 8 << 10
    max_chunks: int = 65_536
    """Of a chunked body (Triton's limit)."""
    header_timeout: float = 10.0
    """Seconds from the first byte, or from connecting, to the end of the headers, however they trickle in."""
    body_idle_timeout: float = 10.0
    """Seconds without any byte of an unfinished body, and before `body_rate` is asked for."""
    body_rate: float = 1024.0
    """Bytes that each further second of an unfinished body must have brought, on average."""
    body_timeout: float = 600.0
    """Seconds that a whole body may take."""
    send_timeout: float = 60.0
    """Seconds without any byte taken by the client while output waits for it."""
    keep_alive_timeout: float = 75.0
    """Seconds that a connection may be idle between two requests. Proxies keep theirs for 60: where the server closes
    first, a request can cross the close on its way, and becomes a 502."""
