"""One of the servers that have a model: its address, its connections, and how it is."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Iterable

from penstock.gateway.configuration.upstream_settings import BaseUrl, UpstreamSettings, base_url
from penstock.gateway.metrics.request_metrics import Histogram
from penstock.gateway.transports.http.http_connection import ConnectionPool

_MOST_SECONDS = 60.0
_MISSED_PROBES = 2


class UpstreamHealth:
    """healthy ──failures in a row──► ejected ──time is over──► on trial ──an answer begins──► healthy
                                         ▲                          │
                                         └───────── a failure ──────┘

    On trial a server has one request at a time. Only an answer that ends well makes the next failure the first one
    again, so that a server whose streams always break is ejected, too. Apart from that, one that two probes in a row
    have not found gets no requests until a probe finds it.
    """

    def __init__(self, eject_after: int, eject_seconds: float) -> None:
        self._eject_after = eject_after
        self._base_seconds = eject_seconds
        self._failures = 0
        """Since an answer has ended well."""
        self._ejected_until: float | None = None
        self._seconds = eject_seconds
        """Of the next ejection."""
        self._rests_until = 0.0
        self._missed = 0
        """Probes in a row."""
        self.ejections = 0

    @property
    def healthy(self) -> bool:
        """Neither ejected nor on trial, and there."""
        return self._ejected_until is None and self._missed < _MISSED_PROBES

    def takes_requests(self, now: float, trials: int) -> bool:
        if self._missed >= _MISSED_PROBES or now < self._rests_until:
            return False
        return self._ejected_until is None or (now >= self._ejected_until and trials == 0)

    def seconds_until(self, now: float) -> float:
        """Until it may take requests again, as far as that is known."""
        return max(0.0, self._rests_until - now, (self._ejected_until or 0.0) - now)

    def began(self) -> None:
        """An answer has begun: the server is there, and its trial is over."""
        self._ejected_until = None
        self._missed = 0

    def answered(self) -> None:
        """To the end, or with an error that is the caller's."""
        self.began()
        self._failures = 0
        self._seconds = self._base_seconds

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._ejected_until is None:
            if self._failures >= self._eject_after:
                self._eject(now)
        elif now >= self._ejected_until:
            self._eject(now)

    def _eject(self, now: float) -> None:
        self._ejected_until = now + self._seconds
        self._seconds = min(self._seconds * 2, max(_MOST_SECONDS, self._base_seconds))
        self.ejections += 1

    def rests(self, until: float) -> None:
        """It has said that it takes nothing before."""
        self._rests_until = max(self._rests_until, until)

    def probed(self, *, there: bool) -> None:
        self._missed = 0 if there else self._missed + 1
        if self._missed == _MISSED_PROBES:
            self.ejections += 1


_FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
Headers = Iterable[tuple[str, str]]


class UpstreamServer:
    def __init__(self, settings: UpstreamSettings, url: str, tls: ssl.SSLContext | None) -> None:
        self.url: BaseUrl = base_url(url)
        self.label = self.url.authority + self.url.path
        """In metrics and logs."""
        self.pool = ConnectionPool(self.url, tls if self.url.secure else None, settings.connect_timeout)
        self.health = UpstreamHealth(settings.eject_after, settings.eject_seconds)
        self.in_flight = 0
        self.waiting_tokens = 0
        """About so many tokens of prompts, of requests without a first byte, are not in its cache."""
        self.trials = 0
        """Attempts that began while it was ejected, until their first byte."""
        self.routed_tokens: Counter[str] = Counter()
        """Of prompts that it was sent, by who says that it has them cached: `events`, `sent`, `no`."""
        self.ended: Counter[str] = Counter()
        """Requests, by the status of their answer or what went wrong."""
        text = "Seconds until the first byte of a stream, or until the head of another answer."
        self.first_byte = Histogram("penstock_upstream_first_byte_seconds", text, _FIRST_BYTE)

    def count_cached(self, tokens: int, cached: int, reported: int) -> None:
        """A prompt, what is expected to be cached of it, and what its events say."""
        by_events = min(reported, cached)
        self.routed_tokens.update(events=by_events, sent=cached - by_events, no=tokens - cached)

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
