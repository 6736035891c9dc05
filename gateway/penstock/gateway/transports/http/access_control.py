"""Access control of an HTTP port: key, role and quota before a body is read, and web pages of other origins."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from penstock.gateway.errors import HttpError
from penstock.gateway.requests.access import Access, ApiGroup, check_restriction
from penstock.gateway.requests.addresses import ip_literal
from penstock.gateway.requests.browser_rules import ANY_ORIGIN, BrowserRules
from penstock.gateway.transports.http.exchange import Exchange, Headers
from penstock.gateway.transports.http.settings import AppSettings

_EXPOSED = (
    b"x-request-id, request-id, retry-after, inference-header-content-length, "
    b"endpoint-load-metrics, endpoint-load-metrics-bin"
)
_MAX_AGE = (b"access-control-max-age", b"600")
_UNKNOWN_PATH_METHODS = ("GET", "HEAD", "POST")
"""For paths that there are not: their 404 is for pages, too."""
_VARIES: Headers = [(b"vary", b"origin")]


class CrossOrigin:
    """What answers tell a browser about web pages of other origins (https://fetch.spec.whatwg.org/#http-cors-protocol).

    starlette's CORSMiddleware would put a coroutine between each frame of a stream and the socket, and refuse in plain
    text; here an answer's head gets these headers with those that it has anyway. Keys are no cookies, so credentials
    stay off."""

    def __init__(self, origins: Collection[str]) -> None:
        """Pages of these origins may use the server; of ANY_ORIGIN: all pages."""
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any = ANY_ORIGIN in origins

    async def answered(self, exchange: Exchange, methods: Callable[[], Collection[str]]) -> bool:
        """Adds to what the exchange's answer tells. Answers preflights, which bring no key, itself: True. `methods`:
        of the exchange's path; none: there is no such path."""
        origin = exchange.headers.get(b"origin")
        if origin is None or not (self._any or origin.lower() in self._origins):
            exchange.extra_headers = () if self._any else _VARIES
            return False
        allowed = (b"access-control-allow-origin", b"*" if self._any else origin)
        exchange.extra_headers = [
            allowed,
            (b"access-control-expose-headers", _EXPOSED),
            *(() if self._any else _VARIES),
        ]
        headers = exchange.headers
        if exchange.scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
            return False
        allowed_methods = ", ".join(sorted(methods() or _UNKNOWN_PATH_METHODS)).encode()
        request_headers = headers.get(b"access-control-request-headers")
        names = [(b"access-control-allow-headers", request_headers)] if request_headers else []
        preflight = [(b"access-control-allow-methods", allowed_methods), _MAX_AGE, *names]
        await exchange.respond(200, b"", content_type=b"text/plain", headers=preflight)
        return True


_HOST = re.compile(r"(?:\[([^\[\]]*:[^\[\]]*)\]|([^\[\]:]+))(?::[0-9]*)?")
_READING = frozenset({"GET", "HEAD"})
"""They change nothing here, and a page cannot read their answers unless the answer allows it."""
_KNOWN_HOSTS = 256


class BrowserGuard:
    """Web pages of others: what a browser is made to send to a server that asks for no key.

    Any page that a user visits can have the browser send requests to addresses which only that user's machine reaches.
    Its own address it may even rename to such an address after it was loaded (DNS rebinding), and then reads the
    answers, too. What a page cannot choose are the headers that tell: Host, Origin and Sec-Fetch-Site. A client that is
    no browser sends none of the latter two. What a page could not know is a key, so none of this matters where one is
    asked for."""

    def __init__(self, rules: BrowserRules) -> None:
        self._rules = rules
        self._origins = frozenset(origin.encode() for origin in rules.origins)
        self._knows = lru_cache(_KNOWN_HOSTS)(self._judge)

    def check(self, exchange: Exchange) -> None:
        """Raises HttpError 403 for what another's page can have sent, InvalidRequestError for several Hosts.

        The order in which Origin and Sec-Fetch-Site count is that of Go's net/http.CrossOriginProtection.
        """
        host = exchange.only_header(b"host")
        if host is not None and not self._knows(host):  # every browser sends one
            raise HttpError(
                403,
                f"This server does not answer to {_text(host)}: a web page may have renamed its own address to this "
                "one. --allowed-hosts allows names; a server with --api-key answers to all.",
                code="host_not_allowed",
            )
        origin = exchange.headers.get(b"origin", b"")
        if exchange.scope["method"] in _READING or origin.lower() in self._origins:
            return
        if not is_of_own_page(exchange.headers):
            raise HttpError(
                403,
                f"Web pages of other origins ({_text(origin)}) may not use a server without keys. --allowed-origins "
                "allows it.",
                code="origin_not_allowed",
            )

    def _judge(self, value: bytes) -> bool:
        """An address in the place of a name cannot be rebound: the page that shows it came from there."""
        host = host_name(value)
        if host is None:
            return False
        address = ip_literal(host)
        if address is None:
            return host == "localhost" or host in self._rules.hosts
        return address.is_loopback or self._rules.any_address or str(address) in self._rules.hosts


def host_name(host: bytes) -> str | None:
    """The name or address in a Host header, in lower case; None: it is not one."""
    match = _HOST.fullmatch(host.decode("latin-1"))
    return None if match is None else (match[1] or match[2]).lower().removesuffix(".")


def is_of_own_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of this server or no page has sent a request. A client that is no browser has neither header."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site in (b"same-origin", b"none")
    # The scheme is left out: behind a proxy that ends TLS it is another one.
    return origin is None or origin.lower().partition(b"://")[2] == headers.get(b"host", b"").lower()


def _text(value: bytes) -> str:
    return repr(value.decode("latin-1"))


class AccessControl:
    """Of one HTTP port. Requests without a key have to pass the browser guard: a web page may have sent them."""

    def __init__(self, settings: AppSettings, may_read: Callable[[Exchange], bool] = lambda exchange: False) -> None:
        """`may_read`: whether a request may only read another's stream (`Exchange.counts_late`), by path and
        headers."""
        self._keys = settings.keys
        self._restrictions = settings.restrictions
        self._guard = BrowserGuard(settings.browsers)
        self._lag = settings.intake.lag
        self._load = settings.load
        self._may_read = may_read

    def admit(self, exchange: Exchange, access: Access | None) -> None:
        """Lets the request in, and lets it begin. Raises as `let_in` and `begin`."""
        self.let_in(exchange, access)
        if access is not None and access.group is ApiGroup.INFERENCE:
            self.begin(exchange)

    def let_in(self, exchange: Exchange, access: Access | None) -> None:
        """Sets the exchange's principal. `access` is the route's; None where there is no such route, which only callers
        with a key are told.

        Raises AuthenticationError, PermissionDeniedError, HttpError, InvalidRequestError.
        """
        if access is not None and access.role is None:  # a probe: kubelets send a pod's address as Host
            check_restriction(self._restrictions, access.group, exchange.headers, "API")
            return
        principal = self._keys.principal(authorization_of(exchange))
        if principal is self._keys.without_key:
            self._guard.check(exchange)
        exchange.context.principal = principal
        if access is not None and access.role is not None:
            check_restriction(self._restrictions, access.group, exchange.headers, "API")
            principal.require(access.role)

    def begin(self, exchange: Exchange) -> None:
        """Counts a request for inference against its quota. Raises RateLimitedError, OverloadedError."""
        exchange.load = self._load
        self._lag.check()
        exchange.counts_late = self._may_read(exchange)
        if not exchange.counts_late:
            exchange.context.count()


def authorization_of(exchange: Exchange) -> bytes | None:
    """Clients of Anthropic's API send their key in a header of its own. Raises InvalidRequestError."""
    authorization, key = exchange.only_header(b"authorization"), exchange.only_header(b"x-api-key")
    return b"Bearer " + key if authorization is None and key is not None else authorization
