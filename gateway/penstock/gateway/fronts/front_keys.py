"""Keys on their way from the supervisor to fronts: digests, and whom they let in."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.front.context import Principal
from penstock.gateway.fronts.messages import KeyEntry, Keys
from penstock.gateway.fronts.quotas import DistantQuota


def keys_message(granted: Mapping[bytes, Principal] | None) -> Keys:
    """None: no keys are asked for."""
    return Keys(keys=None if granted is None else tuple(_entry(*each) for each in granted.items()))


def _entry(digest: bytes, principal: Principal) -> KeyEntry:
    return KeyEntry(
        digest=digest,
        key=principal.key,
        tenant=principal.tenant,
        roles=tuple(principal.roles),
        models=principal.models,
        priority=principal.priority,
        limited=principal.quota is not None,
    )


def granted_by(message: Keys) -> dict[bytes, Principal] | None:
    """As a front has them: what they may use is counted by the supervisor."""
    return None if message.keys is None else {entry.digest: _principal(entry) for entry in message.keys}


def _principal(entry: KeyEntry) -> Principal:
    return Principal(
        tenant=entry.tenant,
        key=entry.key,
        roles=frozenset(entry.roles),
        models=entry.models,
        priority=entry.priority,
        quota=DistantQuota(entry.digest) if entry.limited else None,
    )
