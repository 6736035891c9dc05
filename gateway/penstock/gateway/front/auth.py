"""API keys: digests only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from penstock.engines.errors import AuthenticationError
from penstock.gateway.front.changes import Changes
from penstock.gateway.front.context import ANYONE, Principal


def key_digest(key: bytes) -> bytes:
    """What is kept of a key. A key has 256 random bits, which nobody can guess from its digest however quick the hash
    is: the slow and salted hashes that passwords need would only slow down every request."""
    return hashlib.sha256(key).digest()


def key_id(digest: bytes) -> str:
    """The name under which the use of a key is counted."""
    return digest.hex()[:12]


class ApiKeys:
    """The keys that a server accepts, and the principal of each."""

    def __init__(self, granted: Mapping[bytes, Principal] | None = None) -> None:
        """`granted`: principals by `key_digest`. None: no key is needed, and every caller is ANYONE. An empty mapping
        lets nobody in."""
        self.needed = granted is not None
        self.without_key = None if self.needed else ANYONE
        """The principal of callers without a key; None: they are refused."""
        self._granted = dict(granted or {})
        self.changes = Changes()
        """Told when the keys are replaced."""

    @property
    def granted(self) -> Mapping[bytes, Principal] | None:
        """The current ones by digest; None: no key is needed."""
        return self._granted if self.needed else None

    def letting_in(self, without_key: Principal) -> ApiKeys:
        """The same keys, also after `replace`, for a port on which callers without one are `without_key`."""
        keys = ApiKeys()
        keys.needed, keys.without_key, keys._granted = self.needed, without_key, self._granted
        return keys

    def replace(self, granted: Mapping[bytes, Principal]) -> None:
        """Accepts these keys from now on, and no others. A key whose limits are unchanged keeps what is left of
        them."""
        granted = {
            digest: _keeping_quota(principal, self._granted.get(digest)) for digest, principal in granted.items()
        }
        self._granted.clear()
        self._granted.update(granted)
        self.changes.tell()

    def principal(self, authorization: bytes | None) -> Principal:
        """The one whose key `Authorization: Bearer <key>` carries. Raises AuthenticationError.

        The look-up is by digest, so its time tells an attacker nothing about the keys.
        """
        if not self.needed or (authorization is None and self.without_key is not None):
            return self.without_key or ANYONE
        scheme, _, key = (authorization or b"").partition(b" ")
        principal = self._granted.get(key_digest(key.strip()))
        if principal is None or scheme.lower() != b"bearer":
            raise AuthenticationError(
                "Missing or incorrect API key: send it as 'Authorization: Bearer <key>', or over HTTP as 'x-api-key'."
            )
        return principal


def _keeping_quota(new: Principal, old: Principal | None) -> Principal:
    if new.quota is None or old is None or old.quota is None or old.quota.limits != new.quota.limits:
        return new
    return replace(new, quota=old.quota)
