"""What is checked of a request before its body is read: its headers, its key and role, and its quota."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.front.access import Access, ApiGroup, check_restriction
from penstock.gateway.http.browser_guard import BrowserGuard
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.settings import AppSettings


class Door:
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
        principal = self._keys.principal(_authorization(exchange))
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


def _authorization(exchange: Exchange) -> bytes | None:
    """Clients of Anthropic's API send their key in a header of its own. Raises InvalidRequestError."""
    given, key = exchange.only_header(b"authorization"), exchange.only_header(b"x-api-key")
    return b"Bearer " + key if given is None and key is not None else given
