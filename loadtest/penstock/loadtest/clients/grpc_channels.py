"""gRPC connections, with requests and answers as bytes. The library is loaded when a protocol needs it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.errors import LoadTestError

CALLS_PER_CHANNEL = 32
"""A connection has at most so many calls at a time, then there is another one: servers bound the calls of one, and what
is beyond that would wait within the library, unseen."""
_SERVICE = "/inference.GRPCInferenceService/"
_OURS = frozenset({"connection", "content-length", "content-type", "te", "transfer-encoding", "upgrade", "user-agent"})
_KEY = re.compile(r"[0-9a-z_.-]+(?<!-bin)")
"""Of metadata as text (gRPC's PROTOCOL-HTTP2.md, "Custom-Metadata")."""
_PREFIXES = ("http", "grpc", "https", "grpcs")
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # else one that the environment names would be measured, too
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address would be one connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
Channel = Any
"""grpc.aio.Channel, which has no types."""


class Connection:
    """A channel, with the calls that it has."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.calls = 0
        self._opening = asyncio.create_task(self._open())

    async def opened(self) -> float:
        """Waits until it is connected, or cannot be, which a call then says. Seconds that took; 0: it was open."""
        if self._opening.done():
            return 0.0
        began = perf_counter()
        await asyncio.shield(self._opening)
        return perf_counter() - began

    async def _open(self) -> None:
        from grpc import ChannelConnectivity

        state = self.channel.get_state(try_to_connect=True)
        while state not in (ChannelConnectivity.READY, ChannelConnectivity.TRANSIENT_FAILURE):
            await self.channel.wait_for_state_change(state)
            state = self.channel.get_state()

    async def close(self) -> None:
        self._opening.cancel()
        await self.channel.close()


class Channels:
    """Connections to one server, opened as calls at a time need them."""

    def __init__(self, options: ClientOptions) -> None:
        """Raises LoadTestError for what is no address, and for options that gRPC has no place for."""
        self.target, self._tls = _target(options.url)
        if not options.verify_tls:
            raise LoadTestError(
                "verify-tls: gRPC always checks them; GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names others to trust"
            )
        if not options.keep_alive:
            raise LoadTestError("keep-alive: gRPC keeps its connections")
        self.metadata = _metadata(options)
        self._connections: list[Connection] = []

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """The one with the fewest calls, for one more."""
        found = min(self._connections, key=lambda each: each.calls, default=None)
        if found is None or found.calls >= CALLS_PER_CHANNEL:
            found = Connection(self._open())
            self._connections.append(found)
        found.calls += 1
        try:
            yield found
        finally:
            found.calls -= 1

    def _open(self) -> Channel:
        import grpc

        if self._tls:
            return grpc.aio.secure_channel(self.target, grpc.ssl_channel_credentials(), options=_CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)

    async def close(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()


def method(name: str) -> str:
    return _SERVICE + name


def _metadata(options: ClientOptions) -> list[tuple[str, str]]:
    """Of each call. Raises LoadTestError for headers that the library drops, or that make it fail."""
    given = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    for name, value in options.headers.items():
        key = name.lower()
        if key in _OURS or key.startswith("grpc-"):
            raise LoadTestError(f"header: {name} is set by gRPC itself")
        if not _KEY.fullmatch(key) or not value.isascii():
            raise LoadTestError(
                f"header: {name} cannot be metadata of gRPC, whose names are of a-z, 0-9, _, . and -, "
                "do not end with -bin, and have values of ASCII"
            )
        given[key] = value
    return list(given.items())


def _target(url: str) -> tuple[str, bool]:
    """("host:port", whether it speaks TLS)."""
    try:
        parts = urlsplit(url if "//" in url else f"grpc://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LoadTestError(f"url: {url!r} is not an address: {error}") from None
    if parts.username is not None:
        raise LoadTestError("url: it may have a host and a port, nothing else (--api-key, --header)")
    if parts.scheme not in _PREFIXES or not host or not port or parts.path.strip("/") or parts.query or parts.fragment:
        raise LoadTestError(f"url: {url!r} is not the HOST:PORT of a gRPC server")
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), parts.scheme in ("https", "grpcs")
