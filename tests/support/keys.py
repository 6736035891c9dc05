"""Keys as tests need them."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.context import ALL_ROLES, Principal, Role


def api_keys(given: Mapping[str, str], roles: frozenset[Role] = ALL_ROLES) -> ApiKeys:
    """From tenants' names and their keys; empty: none is asked for."""
    granted = {key_digest(key.encode()): Principal(tenant=tenant, roles=roles) for tenant, key in given.items()}
    return ApiKeys(granted or None)
