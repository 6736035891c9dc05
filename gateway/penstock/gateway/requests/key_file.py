"""The file of keys: who they belong to, and what they allow. It holds digests, so reading it lets nobody in.

version = 1                     # of this form; may be left out
[[key]]
sha256 = "9f86d0..."            # of the key; `penstock key new` writes it
tenant = "search"
roles = ["inference", "metadata"]
models = ["llama-3-8b", "rerank-*"]
priority = 5
requests_per_minute = 600
tokens_per_minute = 200_000
concurrent_requests = 32
tokens_per_day = 5_000_000
tokens_per_month = 100_000_000
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.requests.access import key_id
from penstock.gateway.requests.context import USER_ROLES, Principal, Role
from penstock.gateway.requests.quota import Limits, Quota

_Count = Annotated[int, Meta(ge=1)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A table of the file."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, Meta(pattern="^[A-Za-z0-9._:@-]{1,64}$")]
    roles: frozenset[Role] = USER_ROLES
    models: tuple[str, ...] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent_requests: _Count | None = None
    tokens_per_day: _Count | None = None
    tokens_per_month: _Count | None = None

    def principal(self) -> Principal:
        limits = Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent_requests=self.concurrent_requests,
            tokens_per_day=self.tokens_per_day,
            tokens_per_month=self.tokens_per_month,
        )
        return Principal(
            tenant=self.tenant,
            key=key_id(bytes.fromhex(self.sha256)),
            roles=self.roles,
            models=self.models,
            priority=self.priority,
            quota=Quota(limits) if limits != Limits() else None,
        )


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, Meta(ge=1)] = 1
    key: tuple[KeyEntry, ...] = ()


_VERSION = 1
"""Of the file's form. Files without a number are of the first one."""


def read_keys(path: Path, policy: str) -> dict[bytes, Principal]:
    """By digest. `policy` is the scheduler's. Raises ConfigError, which names the file and the entry."""
    try:
        table = tomllib.loads(path.read_text())
        _refuse_newer(path, table)
        entries = msgspec.convert(table, _KeyFile).key
    except OSError as error:
        raise ConfigError(f"api-key-file: {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"api-key-file: {path}: {error}") from None
    granted: dict[bytes, Principal] = {}
    for number, entry in enumerate(entries, start=1):
        digest = bytes.fromhex(entry.sha256)
        if digest in granted:
            raise ConfigError(f"api-key-file: {path}: key {number} appears twice")
        if entry.priority and policy != "priority":
            raise ConfigError(f"api-key-file: {path}: key {number}: priority needs --policy=priority, not {policy}")
        granted[digest] = entry.principal()
    return granted


def _refuse_newer(path: Path, table: dict[str, Any]) -> None:
    """Before fields that only a newer server knows are called unknown. Raises ConfigError."""
    version = table.get("version")
    if isinstance(version, int) and version > _VERSION:
        raise ConfigError(f"api-key-file: {path}: has version {version}, and this server reads up to {_VERSION}")
