"""Access: what a route is for and who may use it, stated where the route is listed; and API keys, digests only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hmac import compare_digest

from penstock.engines.errors import AuthenticationError
from penstock.gateway.errors import RestrictedApiError
from penstock.gateway.requests.changes import Changes
from penstock.gateway.requests.context import ANYONE, Principal, Role


class ApiGroup(StrEnum):
    """Triton's names for what `--http-restricted-api` and `--grpc-restricted-protocol` restrict."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a route. No table takes a route without one."""

    role: Role | None
    """None: open to all, for probes."""
    group: ApiGroup | None
    """None: Triton knows no such routes, and its flags restrict none."""


PROBE = Access(None, ApiGroup.HEALTH)
INFER = Access(Role.INFERENCE, ApiGroup.INFERENCE)
OWN_FILES = Access(Role.INFERENCE, None)
OWN_MEMORY = Access(Role.INFERENCE, ApiGroup.SHARED_MEMORY)
SEE_MEMORY = Access(Role.METADATA, ApiGroup.SHARED_MEMORY)
SEE_READINESS = Access(Role.METADATA, ApiGroup.HEALTH)
SEE_METADATA = Access(Role.METADATA, ApiGroup.METADATA)
SEE_CONFIG = Access(Role.METADATA, ApiGroup.MODEL_CONFIG)
SEE_STATISTICS = Access(Role.METADATA, ApiGroup.STATISTICS)
SEE_REPOSITORY = Access(Role.METADATA, ApiGroup.MODEL_REPOSITORY)
SEE_TRACE = Access(Role.METADATA, ApiGroup.TRACE)
SEE_LOGGING = Access(Role.METADATA, ApiGroup.LOGGING)
SEE_METRICS = Access(Role.METRICS, None)
CHANGE_MODELS = Access(Role.ADMIN, ApiGroup.MODEL_REPOSITORY)
CHANGE_TRACE = Access(Role.ADMIN, ApiGroup.TRACE)
CHANGE_LOGGING = Access(Role.ADMIN, ApiGroup.LOGGING)
OPERATE = Access(Role.ADMIN, None)


@dataclass(frozen=True, slots=True)
class RequiredHeader:
    name: str
    value: str


Restrictions = Mapping[ApiGroup, RequiredHeader]
"""What requests to these groups have to carry, besides a key where one is asked for."""


def read_restrictions(texts: Iterable[str], header_prefix: str = "") -> Restrictions:
    """From `API[,API]:HEADER=VALUE`, as Triton's flags give them. Raises ValueError."""
    restrictions: dict[ApiGroup, RequiredHeader] = {}
    for text in texts:
        names, colon, rest = text.partition(":")
        header, equals, value = rest.partition("=")
        if not (colon and equals and header.strip() and value.strip()):
            raise ValueError(f"{text!r} is not API[,API]:HEADER=VALUE")
        for name in names.split(","):
            try:
                group = ApiGroup(name.strip())
            except ValueError:
                raise ValueError(f"no API is called {name.strip()!r}; there are {', '.join(ApiGroup)}") from None
            if group in restrictions:
                raise ValueError(f"{group} is restricted twice")
            restrictions[group] = RequiredHeader(header_prefix + header.strip(), value.strip())
    return restrictions


def check_restriction(
    restrictions: Restrictions, group: ApiGroup | None, headers: Mapping[bytes, bytes], what: str
) -> None:
    """Raises RestrictedApiError in Triton's words. `headers` are by lower-case name."""
    required = restrictions.get(group) if restrictions and group is not None else None
    if required is None:
        return
    value = headers.get(required.name.lower().encode(), b"")
    if not compare_digest(value, required.value.encode()):  # the time that it takes tells nothing of the value
        raise RestrictedApiError(f"This {what} is restricted, expecting header '{required.name}'")


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
