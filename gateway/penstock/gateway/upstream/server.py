"""One of the servers that have a model: its address, its connections, and how it is."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Iterable

from penstock.gateway.configuration.upstream_settings import BaseUrl, UpstreamSettings, base_url
from penstock.gateway.metrics.requests import Histogram
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.server_health import ServerHealth

_FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
Headers = Iterable[tuple[str, str]]


class UpstreamServer:
    def __init__(self, settings: UpstreamSettings, url: str, tls: ssl.SSLContext | None) -> None:
        self.url: BaseUrl = base_url(url)
        self.label = self.url.authority + self.url.path
        """In metrics and logs."""
        self.pool = ConnectionPool(self.url, tls if self.url.secure else None, settings.connect_timeout)
        self.health = ServerHealth(settings.eject_after, settings.eject_seconds)
        self.in_flight = 0
        self.trials = 0
        """Attempts that began while it was ejected, until their first byte."""
        self.ended: Counter[str] = Counter()
        """Requests, by the status of their answer or what went wrong."""
        text = "Seconds until the first byte of a stream, or until the head of another answer."
        self.first_byte = Histogram("penstock_upstream_first_byte_seconds", text, _FIRST_BYTE)

    def takes_requests(self, now: float) -> bool:
        return self.health.takes_requests(now, self.trials)

    def request(self, method: str, path: str, headers: Headers, body: bytes = b"") -> bytes:
        """The bytes of a request. `path` is one behind the url's, or from the root if it begins with a slash."""
        target = path if path.startswith("/") else f"{self.url.path}/{path}"
        lines = [f"{method} {target} HTTP/1.1", f"host: {self.url.authority}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def least_busy(servers: Iterable[UpstreamServer], now: float) -> UpstreamServer | None:
    """Of those that take requests; the first of equals, so the caller turns the order."""
    there = [server for server in servers if server.takes_requests(now)]
    return min(there, key=lambda server: server.in_flight, default=None)


async def probe(server: UpstreamServer, path: str, headers: Headers, seconds: float) -> bool:
    """Whether the server is there: any answer but a server's error says so, also that it has no such path."""
    try:
        async with asyncio.timeout(seconds):
            connection = await server.pool.ask(server.request("GET", path, headers))
    except Exception:
        return False
    there = connection.status < 500
    connection.close()  # what it lists may be long
    return there
