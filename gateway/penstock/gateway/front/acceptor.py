"""A listening socket that changes its certificates while it accepts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from penstock.gateway.front.listening import listener
from penstock.gateway.front.tls import Certificates, ReloadedCertificates, TlsSettings

_KERNEL_BACKLOG = 128 << 10
"""Bytes that the kernel may hold for a client whose window is full. Its default of megabytes would hide for long that a
client does not read, and that a slow one does."""
_CLOSING_SECONDS = 3600.0
"""That a TLS connection may take to close. Readers that are slow may need long; those that do not read at all the
protocol cuts off by itself."""


class Acceptor:
    """Binds, then accepts from `start` to `close`."""

    def __init__(
        self, tls: TlsSettings, protocol: Callable[[], asyncio.BaseProtocol], handshake_seconds: float, backlog: int
    ) -> None:
        """Raises ConfigError, with the flag to blame, when the TLS files are not usable."""
        self._certificates = ReloadedCertificates(tls) if tls.enabled else None
        self._protocol = protocol
        self._handshake_seconds = handshake_seconds
        self._backlog = backlog
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._following: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """The bound port. Raises OSError."""
        bound = listener(host, port, backlog=self._backlog)
        return self.take(bound)

    def take(self, bound: socket.socket) -> int:
        """A socket that listens already becomes this one's. Its port."""
        bound.setblocking(False)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted sockets inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_BACKLOG)
        self._socket = bound
        return int(bound.getsockname()[1])

    async def start(self) -> None:
        await self._listen(self._certificates.current if self._certificates is not None else None)
        if self._certificates is not None:
            self._following = asyncio.create_task(self._certificates.follow(self._listen))

    async def _listen(self, certificates: Certificates | None) -> None:
        """Accepts with these certificates from now on. Each listener has its own copy of the socket's descriptor, so
        that none of the connections that wait in the kernel is lost when the next one takes over."""
        if self._socket is None:
            return
        tls: dict[str, Any] = {}
        if certificates is not None:
            tls["ssl"] = certificates.context
            tls["ssl_handshake_timeout"] = self._handshake_seconds
            tls["ssl_shutdown_timeout"] = _CLOSING_SECONDS
        former = self._listener
        copy = self._socket.dup()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._protocol, sock=copy, backlog=self._backlog, **tls)
        if former is not None:
            former.close()

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        if self._certificates is not None:
            self._certificates.reload()

    def close(self) -> None:
        """Connections live on. Idempotent."""
        if self._following is not None:
            self._following.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
