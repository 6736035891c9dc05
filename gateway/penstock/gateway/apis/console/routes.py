"""Routes of the console, who may look, and who may act.

A server without keys shows it on loopback alone, read-only. Web pages of others must not get at it: requests that a
proxy has passed on, that name another host (DNS rebinding), or that come from another site are refused, and data needs
a header that such a page cannot send without a preflight. On a server with keys the files are for everybody, since a
browser can send no key with them; what the server has and does is an admin's to see.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from pathlib import PurePosixPath

import msgspec
from sse_starlette import EventSourceResponse

from penstock.engines.errors import NotFoundError, OverloadedError, PermissionDeniedError
from penstock.gateway.apis.console.feed import ConsoleFeed
from penstock.gateway.apis.console.views import ConsoleSources, Look
from penstock.gateway.errors import HttpError
from penstock.gateway.requests.access import OPERATE, Access, ApiKeys
from penstock.gateway.requests.addresses import is_loopback
from penstock.gateway.requests.bounded_json import decode_json
from penstock.gateway.transports.http.access_control import authorization_of, host_name, is_of_own_page
from penstock.gateway.transports.http.compression import accepted_coding
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import Api, Route

CONSOLE = Api("console", prefix="/console")
_OPEN = Access(None, None)
_MARK = b"x-penstock-console"
"""Header of all requests for data. It is not among those that a page may send to another origin without a preflight."""
_FORWARDED = (b"forwarded", b"via", b"x-real-ip")
_ALSO_FORWARDED = b"x-forwarded-"
_MOST_STREAMS = 16
_MOST_BODY = 4096
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_PAGE = "index.html"


class CancelBody(msgspec.Struct, forbid_unknown_fields=True):
    id: str


def console_routes(sources: ConsoleSources, keys: ApiKeys) -> list[Route]:
    guard, assets = ConsoleGuard(keys), _Assets()
    console = _Console(sources, guard)
    return [
        Route("GET", "/console", _OPEN, partial(assets.show, guard, _PAGE), CONSOLE),
        Route("GET", "/console/live", OPERATE, console.stream, CONSOLE, query=("view", "model", "request")),
        Route("POST", "/console/cancel", OPERATE, console.cancel, CONSOLE, schema=CancelBody),
        Route("GET", "/console/{file}", _OPEN, partial(assets.show_named, guard), CONSOLE, is_shown=False),
    ]


class ConsoleGuard:
    """What is asked of requests for the console beside what the door asks. Raises HttpError 403,
    PermissionDeniedError."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def check_page(self, exchange: Exchange) -> None:
        """For files."""
        if self._keys.needed:
            return
        headers = exchange.headers
        if any(name in _FORWARDED or name.startswith(_ALSO_FORWARDED) for name in headers):
            raise _refusal("a server without keys does not show its console through a proxy")
        client = exchange.scope.get("client")
        if client and not is_loopback(client[0]):
            raise _refusal("a server without keys shows its console on its own machine alone")
        host = exchange.only_header(b"host")
        if host is not None and not is_loopback(host_name(host) or ""):
            raise _refusal("a server without keys shows its console under localhost and its addresses alone")

    def check_data(self, exchange: Exchange) -> None:
        """For what a page of this server has asked for."""
        self.check_page(exchange)
        if _MARK not in exchange.headers or not is_of_own_page(exchange.headers):
            raise _refusal("only the console's own page gets its data")

    def check_action(self, exchange: Exchange) -> None:
        """For what changes something: never without an admin's key."""
        self.check_data(exchange)
        if not self._keys.needed:
            raise PermissionDeniedError("The console is read-only on a server without keys: start it with --admin-key.")

    def check_key(self, exchange: Exchange) -> None:
        """Again, while a stream runs: its key may have been taken away. Raises AuthenticationError."""
        self._keys.principal(authorization_of(exchange))

    @property
    def may_act(self) -> bool:
        return self._keys.needed


def _refusal(reason: str) -> HttpError:
    return HttpError(403, f"{reason[0].upper()}{reason[1:]}.", code="console_refused")


class _Console:
    def __init__(self, sources: ConsoleSources, guard: ConsoleGuard) -> None:
        self._sources = sources
        self._guard = guard
        self._feed = ConsoleFeed(sources, may_act=guard.may_act)
        self._streams = 0

    async def stream(self, exchange: Exchange) -> None:
        """What a page shows, as server-sent events, until it leaves. Raises OverloadedError."""
        self._guard.check_data(exchange)
        if self._streams >= _MOST_STREAMS:
            raise OverloadedError(f"{_MOST_STREAMS} consoles look at this server already.", retry_after=5)
        query = exchange.query
        look = Look(query.get("view", ""), query.get("model", "")[:256], query.get("request", "")[:128])
        self._streams += 1
        try:
            events = self._feed.events(look, lambda: self._guard.check_key(exchange))
            headers = {name.decode(): value.decode() for name, value in _HEADERS}
            response = EventSourceResponse(events, headers=headers)
            await response(exchange.scope, exchange.receive, exchange.send)
        finally:
            self._streams -= 1

    async def cancel(self, exchange: Exchange) -> None:
        """Ends a request that is in flight. Raises NotFoundError."""
        self._guard.check_action(exchange)
        body = decode_json(await exchange.body(_MOST_BODY), CancelBody)
        if not await self._sources.requests.cancel(body.id):
            raise NotFoundError(f"No request `{body.id[:128]}` is in flight.")
        await exchange.respond(200, b'{"cancelled":true}', headers=_HEADERS)


@dataclass(frozen=True)
class _Asset:
    content_type: bytes
    data: bytes

    @cached_property
    def tag(self) -> bytes:
        return b'"' + hashlib.sha256(self.data).hexdigest()[:32].encode() + b'"'

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.data, mtime=0)


class _Assets:
    """The files of the page, read at the first request for one."""

    @cached_property
    def _by_name(self) -> Mapping[str, _Asset]:
        folder = files("penstock.gateway.apis.console") / "static"
        kinds = {file.name: _TYPES.get(PurePosixPath(file.name).suffix) for file in folder.iterdir()}
        return {name: _Asset(kind, (folder / name).read_bytes()) for name, kind in kinds.items() if kind is not None}

    async def show_named(self, guard: ConsoleGuard, exchange: Exchange) -> None:
        await self.show(guard, exchange.names["file"], exchange)

    async def show(self, guard: ConsoleGuard, name: str, exchange: Exchange) -> None:
        """Raises NotFoundError."""
        guard.check_page(exchange)
        asset = self._by_name.get(name)
        if asset is None:
            raise NotFoundError("The console has no such file.")
        headers = [*_HEADERS, (b"cache-control", b"no-cache"), (b"etag", asset.tag), (b"vary", b"accept-encoding")]
        if exchange.headers.get(b"if-none-match") == asset.tag:
            await exchange.respond(304, b"", content_type=asset.content_type, headers=headers)
        elif accepted_coding(exchange.headers.get(b"accept-encoding")) == b"gzip":
            headers.append((b"content-encoding", b"gzip"))
            await exchange.respond(200, asset.compressed, content_type=asset.content_type, headers=headers)
        else:
            await exchange.respond(200, asset.data, content_type=asset.content_type, headers=headers)
