"""Web pages of others: what a browser is made to send to a server that asks for no key.

Any page that a user visits can have the browser send requests to addresses which only that user's machine reaches. Its
own address it may even rename to such an address after it was loaded (DNS rebinding), and then reads the answers, too.
What a page cannot choose are the headers that tell: Host, Origin and Sec-Fetch-Site. A client that is no browser sends
none of the latter two. What a page could not know is a key, so none of this matters where one is asked for.
"""

from __future__ import annotations

import re
from functools import lru_cache

from penstock.gateway.errors import HttpError
from penstock.gateway.front.addresses import ip_literal
from penstock.gateway.front.browser_rules import BrowserRules
from penstock.gateway.http.exchange import Exchange

_HOST = re.compile(r"(?:\[([^\[\]]*:[^\[\]]*)\]|([^\[\]:]+))(?::[0-9]*)?")
_READING = frozenset({"GET", "HEAD"})
"""They change nothing here, and a page cannot read their answers unless the answer allows it."""
_KNOWN_HOSTS = 256


class BrowserGuard:
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
        headers = exchange.headers
        if exchange.scope["method"] in _READING or (b"origin" not in headers and b"sec-fetch-site" not in headers):
            return
        origin = headers.get(b"origin", b"")
        if origin.lower() in self._origins:
            return
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            own = site in (b"same-origin", b"none")
        else:
            # The scheme is left out: behind a proxy that ends TLS it is another one.
            own = origin.lower().partition(b"://")[2] == (host or b"").lower()
        if not own:
            raise HttpError(
                403,
                f"Web pages of other origins ({_text(origin)}) may not use a server without keys. --allowed-origins "
                "allows it.",
                code="origin_not_allowed",
            )

    def _judge(self, given: bytes) -> bool:
        """An address in the place of a name cannot be rebound: the page that shows it came from there."""
        match = _HOST.fullmatch(given.decode("latin-1"))
        if match is None:
            return False
        host = (match[1] or match[2]).lower().removesuffix(".")
        address = ip_literal(host)
        if address is None:
            return host == "localhost" or host in self._rules.hosts
        return address.is_loopback or self._rules.any_address or str(address) in self._rules.hosts


def _text(value: bytes) -> str:
    return repr(value.decode("latin-1"))
