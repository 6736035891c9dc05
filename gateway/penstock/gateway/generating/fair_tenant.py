"""The tenant that a fair scheduler charges for a request."""

from __future__ import annotations

from penstock.gateway.front.context import RequestContext

_MAX_USER = 128
"""Characters by which users are told apart."""


def fair_tenant(context: RequestContext, user: str | None, policy: str) -> str:
    """The tenant of the request's key. On a server without keys that is fair, the user that the request names: it has
    only the callers' word for who they are. Under other policies `user` has no effect: tenants share no cached
    prefixes, which would be expensive for a server with one prompt for all its users."""
    return context.tenant or ((user or "")[:_MAX_USER] if policy == "fair" else "")
