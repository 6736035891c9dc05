"""Images on other servers: fetched from the domains that the operator allows, and never from private addresses.

A client chooses the URL, so it must not lead to what only this machine can reach. A name is resolved once, all its
addresses are checked, and the connection goes to one of these, whatever the name means a moment later. No proxies,
cookies or keys are used.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from penstock.engines.errors import InvalidRequestError, OverloadedError
from penstock.gateway.transports.http.http_connection import BrokenAnswer, CannotConnect, HttpConnection, connected

_SECONDS = 20.0
"""For an image, with all that leads to it."""
_CONNECT_SECONDS = 5.0
_MOST_ADDRESSES = 3
"""Of a name that are tried."""
_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_URL = 8192
_AT_ONCE, _MOST_WAITING = 8, 64
_HOST = re.compile(r"[a-z0-9_.-]{1,253}|[0-9a-f:.]{2,45}")
"""A name, or an address without brackets."""
_DOMAIN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_ESCAPED = "%/:=&?~+!$,;'@()*[]"
"""What stays as it is in paths and queries, beside letters and digits."""
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""IPv4 addresses behind a translator (RFC 6052)."""
_SPECIAL = (IPv4Network("192.0.0.0/24"), IPv6Network("64:ff9b:1::/48"))
"""Beside those that every Python in use knows as such."""


class _Refusal(Exception):
    """Why a URL is not fetched, or has no image."""


class _Target(NamedTuple):
    secure: bool
    host: str
    port: int
    path: str

    @property
    def request(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == (443 if self.secure else 80) else f":{self.port}"
        lines = (
            f"GET {self.path} HTTP/1.1",
            f"host: {host}{port}",
            "user-agent: penstock",
            "accept: image/*",
            "accept-encoding: identity",
            "connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name and a port. Raises OSError."""


def domain(text: str) -> str:
    """As it is compared: an exact name, or `*.` and what names end with. Raises ValueError."""
    name = text.strip().rstrip(".").lower()
    if not _DOMAIN.fullmatch(name):
        raise ValueError(f"{text!r} must be a domain such as images.example.com or *.example.com")
    return name


def is_public(address: str) -> bool:
    """Whether it is one that the whole internet reaches: no loopback, link-local, private, shared, multicast or
    reserved one, in no disguise."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped or (IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _TRANSLATED else None)
        if inner is not None:
            return is_public(str(inner))
        if ip.sixtofour is not None or ip.teredo is not None or ip.is_site_local:
            return False
    special = ip.is_multicast or ip.is_reserved or ip.is_unspecified or any(ip in network for network in _SPECIAL)
    return ip.is_global and not special


async def _resolved(host: str, port: int) -> Sequence[str]:
    places = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in places))


class ImageFetcher:
    """Of one process."""

    def __init__(
        self,
        domains: Sequence[str],
        *,
        resolve: Resolve = _resolved,
        may_connect: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`domains`: as `domain` gives them. `may_connect`: to an address. `tls`: of clients; None: the system's."""
        self._names = frozenset(name for name in domains if not name.startswith("*."))
        self._endings = tuple(name[1:] for name in domains if name.startswith("*."))
        self._resolve = resolve
        self._may_connect = may_connect
        self._tls = tls
        self._seats = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    async def fetch(self, url: str, most: int, where: str) -> bytes:
        """At most `most` bytes. `where`: the client's name for it. Raises InvalidRequestError, OverloadedError."""
        if self._waiting >= _MOST_WAITING:
            raise OverloadedError("Too many images wait to be fetched. Try again later.", retry_after=1.0)
        self._waiting += 1
        try:
            async with self._seats, asyncio.timeout(_SECONDS):
                return await self._followed(url, most)
        except _Refusal as refusal:
            reason = str(refusal)
        except TimeoutError:
            reason = f"it took longer than {_SECONDS:.0f} s"
        finally:
            self._waiting -= 1
        raise InvalidRequestError(f"{where}: the image cannot be fetched: {reason}.", param=where)

    async def _followed(self, url: str, most: int) -> bytes:
        for _ in range(1 + _MOST_REDIRECTS):
            target = self._target(url)
            connection = await self._connected(target)
            try:
                await connection.request(target.request)
                if connection.status not in _REDIRECTS:
                    return await _body(connection, most)
                url = urljoin(url, connection.headers.get(b"location", b"").decode("latin-1"))
            except BrokenAnswer as error:
                raise _Refusal(str(error)) from None
            except ValueError:
                raise _Refusal("it is redirected to what is no URL") from None
            finally:
                connection.close()
        raise _Refusal(f"it is redirected more than {_MOST_REDIRECTS} times")

    def _target(self, url: str) -> _Target:
        """Raises _Refusal for all but http and https URLs in the domains."""
        if len(url) > _MOST_URL or _UNSAFE.search(url):
            raise _Refusal("its URL is too long, or has blanks or backslashes")
        try:
            parts = urlsplit(url)
            port = parts.port
            host = (parts.hostname or "").encode("idna").decode().rstrip(".")
        except (ValueError, UnicodeError):
            raise _Refusal("its URL is not valid") from None
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host):
            raise _Refusal("its URL must begin with https:// or http:// and a host")
        if parts.username is not None or parts.password is not None:
            raise _Refusal("its URL must not have a user or a password")
        if host not in self._names and not host.endswith(self._endings):
            raise _Refusal("its domain is not one of --allowed-media-domains")
        secure = parts.scheme == "https"
        path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_ESCAPED)
        return _Target(secure, host, port or (443 if secure else 80), path)

    async def _connected(self, target: _Target) -> HttpConnection:
        """Raises _Refusal."""
        tls = self._context() if target.secure else None
        error: Exception = CannotConnect("it has no address")
        for address in await self._addresses(target):
            try:
                return await connected(address, target.port, tls, target.host, _CONNECT_SECONDS)
            except CannotConnect as failure:
                error = failure
        raise _Refusal(f"its server does not answer: {error}")

    async def _addresses(self, target: _Target) -> Sequence[str]:
        """Raises _Refusal if only one of them is not public."""
        try:
            addresses = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            raise _Refusal("its domain has no address") from None
        if not all(map(self._may_connect, addresses)):
            raise _Refusal("its domain has an address that is not public")
        return addresses[:_MOST_ADDRESSES]

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


async def _body(connection: HttpConnection, most: int) -> bytes:
    """Raises _Refusal, BrokenAnswer."""
    if connection.status != 200:
        raise _Refusal(f"its server answers {connection.status}")
    length = connection.headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > most:
        raise _Refusal(f"it has more than {most >> 20} MiB")
    return await connection.read(most)
