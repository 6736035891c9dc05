"""What a route is for, and who may use it: stated where the route is listed, in every protocol's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hmac import compare_digest

from penstock.gateway.errors import RestrictedApiError
from penstock.gateway.front.context import Role


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
    given = headers.get(required.name.lower().encode(), b"")
    if not compare_digest(given, required.value.encode()):  # the time that it takes tells nothing of the value
        raise RestrictedApiError(f"This {what} is restricted, expecting header '{required.name}'")
