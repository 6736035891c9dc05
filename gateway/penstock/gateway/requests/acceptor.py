"""Listening sockets: how many connections there may be, and their acceptance, with certificates that may change."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.configuration.sections.types import ListeningPort
from penstock.gateway.requests.addresses import url_host
from penstock.gateway.requests.tls import Certificates, ReloadedCertificates, TlsSettings

logger = logging.getLogger(__name__)

_KERNEL_BACKLOG = 128 << 10
"""Bytes that the kernel may hold for a client whose window is full. Its default of megabytes would hide for long that a
client does not read, and that a slow one does."""
_CLOSING_SECONDS = 3600.0
"""That a TLS connection may take to close. Readers that are slow may need long; those that do not read at all the
protocol cuts off by itself."""
_AT_ONCE = 32
"""Connections that are accepted before others are served again."""
_PAUSE_SECONDS = 1.0
"""Without accepting, while the process or the system has no room for another connection."""
_RESERVED = 128
"""For everything else: engines, models' processes, files, gRPC."""
_LEAST = 16


def connections_within_limit(limit: int) -> int:
    """`limit`, or fewer where the process may not have that many descriptors. Raises the soft limit to the hard one
    first."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limit + _RESERVED
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(_LEAST, min(limit, soft - _RESERVED))
    return limit


def listener(host: str, port: int, *, backlog: int = 1, reuse_port: bool = False) -> socket.socket:
    """Bound and listening. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, reuse_port=reuse_port)


def cannot_listen(server: ServerConfig, kind: ListeningPort, error: OSError) -> ConfigError:
    """The error of a port that cannot be opened, with the flag to blame: the port's where it is taken or not allowed,
    else the address's."""
    port: int = getattr(server, f"{kind}_port")
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        flag = f"{kind}-port"
    else:
        flag = "host" if getattr(server, f"{kind}_address") is None else f"{kind}-address"
    reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return ConfigError(f"{flag}: cannot listen on {url_host(server.address(kind))}:{port}: {reason}")


class Acceptor:
    """Binds, then accepts from `start` to `close`.

    It accepts by itself, since `create_server` of uvloop takes one connection in each turn of the loop: where turns are
    long because there is much to do, new clients would wait until the others have gone.
    """

    def __init__(
        self, tls: TlsSettings, protocol: Callable[[], asyncio.BaseProtocol], handshake_seconds: float, backlog: int
    ) -> None:
        """Raises ConfigError, with the flag to blame, when the TLS files are not usable."""
        self._certificates = ReloadedCertificates(tls) if tls.enabled else None
        self._protocol = protocol
        self._handshake_seconds = handshake_seconds
        self._backlog = backlog
        self._socket: socket.socket | None = None
        self._tls: dict[str, Any] = {}
        """For new connections."""
        self._beginning: set[asyncio.Task[None]] = set()
        """Connections that are being set up: tasks that nobody holds may vanish."""
        self._following: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None

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
        if self._certificates is not None:
            await self._use(self._certificates.current)
            self._following = asyncio.create_task(self._certificates.follow(self._use))
        self._resume()

    async def _use(self, certificates: Certificates) -> None:
        self._tls = {
            "ssl": certificates.context,
            "ssl_handshake_timeout": self._handshake_seconds,
            "ssl_shutdown_timeout": _CLOSING_SECONDS,
        }

    def _resume(self) -> None:
        self._pause = None
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    def _accept(self, bound: socket.socket) -> bool:
        """Whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                connection = bound.accept()[0]
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionError:  # the client has gone again
                continue
            except OSError as error:  # too many open files, no memory: the loop would call this again at once
                logger.warning("no connection can be accepted now: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(bound)
                self._pause = loop.call_later(_PAUSE_SECONDS, self._resume)
                return False
            connection.setblocking(False)
            task = asyncio.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the client has gone, its handshake has failed or took too long
            await loop.connect_accepted_socket(self._protocol, connection, **self._tls)

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        if self._certificates is not None:
            self._certificates.reload()

    async def refuse(self) -> None:
        """Closes, for other processes that have the same socket, too: else the kernel would go on taking connections in
        that nobody serves. Those that the kernel has taken in before are served: it would reset them, and a client may
        have sent its request. Returns when their handshakes are over. Idempotent."""
        if self._socket is not None:
            for _ in range(self._backlog):
                if not self._accept(self._socket):
                    break
            with suppress(OSError):  # it is shut down already, or the system cannot do that
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()
        if self._beginning:
            await asyncio.wait(self._beginning)

    def close(self) -> None:
        """Connections live on. Idempotent."""
        if self._following is not None:
            self._following.cancel()
        if self._pause is not None:
            self._pause.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
