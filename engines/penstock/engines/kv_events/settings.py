"""Settings of KV cache events: the endpoints where they are published."""

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
    rank: int = 0
    """Of a replica among those of its model: part of every batch, as vLLM's `data_parallel_rank`."""

    def __post_init__(self) -> None:
        for name, endpoint in (("kv-events", self.endpoint), ("kv-events-replay", self.replay)):
            if endpoint or name == "kv-events":
                _check(name, endpoint)
        if self.replay == self.endpoint:
            raise ValueError("kv-events-replay: it needs a port of its own")

    def of_replica(self, rank: int, replicas: int) -> KVEventsConfig:
        """Each replica has ports of its own: its rank is added to those of the first one, as vLLM does with
        data-parallel ranks. Raises ValueError where there are not so many ports, or two would need the same one."""
        if self.replay and abs(_port(self.endpoint) - _port(self.replay)) < replicas:
            raise ValueError(f"kv-events-replay: {replicas} replicas need it {replicas} ports or more from kv-events")
        replay = self.replay and _moved(self.replay, rank)
        return msgspec.structs.replace(self, endpoint=_moved(self.endpoint, rank), replay=replay, rank=rank)

    @property
    def exposed(self) -> list[str]:
        """Endpoints that other machines may reach."""
        return [endpoint for endpoint in (self.endpoint, self.replay) if endpoint and not _is_loopback(endpoint)]


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


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _moved(endpoint: str, ports: int) -> str:
    return f"{endpoint.rpartition(':')[0]}:{_port(endpoint) + ports}"


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).netloc.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return host != "*" and ipaddress.ip_address(host).is_loopback
