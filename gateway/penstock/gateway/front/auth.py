"""API keys: digests only, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from penstock.engines.errors import AuthenticationError
from penstock.gateway.front.context import ANYONE, Principal


class ApiKeys:
    """Who may come in. `keys` maps a tenant's name to its key; only SHA-256 digests are kept."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(tenant, hashlib.sha256(key.encode()).digest()) for tenant, key in keys.items()]

    @property
    def needed(self) -> bool:
        return bool(self._digests)

    def principal(self, authorization: bytes | None) -> Principal:
        """The one whose key `Authorization: Bearer <key>` carries. Raises AuthenticationError.

        Every key is compared, whichever matches, so the time tells nothing. Without any keys all are let in as ANYONE.
        """
        if not self._digests:
            return ANYONE
        scheme, _, key = (authorization or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = [tenant for tenant, digest in self._digests if hmac.compare_digest(digest, given)]
        if not found or scheme.lower() != b"bearer":
            raise AuthenticationError("Missing or incorrect API key: send it as 'Authorization: Bearer <key>'.")
        return Principal(tenant=found[0])
