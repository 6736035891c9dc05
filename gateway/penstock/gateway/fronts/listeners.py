"""The ports of a server with several fronts: bound once by the supervisor, which keeps them while fronts come and go.

Each front has listening sockets of its own (SO_REUSEPORT), so the kernel spreads connections evenly over the fronts.
The supervisor has them, too, and never accepts: connections that wait when a front dies are not lost, they are served
by the one that takes its place.
"""

from __future__ import annotations

import socket

from penstock.gateway.front.acceptor import listener

_BACKLOG = 2048


def reserve(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets that listen on one port; 0: any free one. Raises OSError, also where another server has the port,
    one that shares ports included."""
    if port:
        listener(host, port).close()  # without SO_REUSEPORT nobody else may have it
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(listener(host, port, backlog=_BACKLOG, reuse_port=True))
            port = sockets[0].getsockname()[1]
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets
