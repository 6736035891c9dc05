"""What answers tell a browser about web pages of other origins: CORS.

The protocol: https://fetch.spec.whatwg.org/#http-cors-protocol. starlette's CORSMiddleware would put a coroutine
between each frame of a stream and the socket, and refuse in plain text; here an answer's head gets these headers with
those that it has anyway. Keys are no cookies, so credentials stay off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from penstock.gateway.front.browser_rules import ANY_ORIGIN
from penstock.gateway.http.exchange import Exchange, Headers

_EXPOSED = (
    b"x-request-id, request-id, retry-after, inference-header-content-length, "
    b"endpoint-load-metrics, endpoint-load-metrics-bin"
)
_MAX_AGE = (b"access-control-max-age", b"600")
_ELSEWHERE = ("GET", "HEAD", "POST")
"""For paths that there are not: their 404 is for pages, too."""
_VARIES: Headers = [(b"vary", b"origin")]


class CrossOrigin:
    """Pages of these origins may use the server; of ANY_ORIGIN: all pages."""

    def __init__(self, origins: Collection[str]) -> None:
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
        allowed_methods = ", ".join(sorted(methods() or _ELSEWHERE)).encode()
        wanted = headers.get(b"access-control-request-headers")
        names = [(b"access-control-allow-headers", wanted)] if wanted else []
        preflight = [(b"access-control-allow-methods", allowed_methods), _MAX_AGE, *names]
        await exchange.respond(200, b"", content_type=b"text/plain", headers=preflight)
        return True
