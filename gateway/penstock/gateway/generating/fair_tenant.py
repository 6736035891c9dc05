"""Whom a fair scheduler charges for a request."""

from __future__ import annotations

from penstock.gateway.front.context import RequestContext

_MAX_USER = 128
"""Characters by which users are told apart."""


def fair_tenant(context: RequestContext, user: str | None, policy: str) -> str:
    """The key's tenant, else the user that the request names. Without keys a fair server has only the callers' own word
    for who they are. Elsewhere `user` changes nothing: tenants share no cached prefixes, which would cost a server with
    one prompt for all its users dearly."""
    return context.tenant or ((user or "")[:_MAX_USER] if policy == "fair" else "")
