"""Where events are published."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec

_FORM = "it is tcp://ADDRESS:PORT with an IP address of this machine, or * for all of them"


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError for an endpoint that cannot be."""

    endpoint: str
    """Where subscribers connect."""
    replay: str = ""
    """Where they ask for what they have missed; empty: nowhere."""
    topic: str = ""
    """The first part of every message, by which they choose."""

    def __post_init__(self) -> None:
        for name, endpoint in (("kv-events", self.endpoint), ("kv-events-replay", self.replay)):
            if endpoint or name == "kv-events":
                _check(name, endpoint)
        if self.replay == self.endpoint:
            raise ValueError("kv-events-replay: it needs a port of its own")

    @property
    def exposed(self) -> list[str]:
        """Endpoints that other machines may reach."""
        return [each for each in (self.endpoint, self.replay) if each and not _is_loopback(each)]


def _check(name: str, endpoint: str) -> None:
    parts = urlsplit(endpoint)
    host, _, port = parts.netloc.rpartition(":")
    if parts.scheme != "tcp" or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or parts.path:
        raise ValueError(f"{name}: {endpoint!r}: {_FORM}")
    if host != "*":
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise ValueError(f"{name}: {endpoint!r}: {_FORM}") from None


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).netloc.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return host != "*" and ipaddress.ip_address(host).is_loopback
