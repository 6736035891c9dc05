"""Listening sockets, and which flag is to blame when there can be none."""

from __future__ import annotations

import errno
import os
import socket

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.configuration.sections.types import ListeningPort
from penstock.gateway.front.addresses import url_host


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
