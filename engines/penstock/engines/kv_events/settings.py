"""Settings of KV cache events: the endpoints where they are published, and where other servers publish theirs."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec

_MOST_RANKS = 64
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


class KVEventsSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a server publishes; fields as vLLM's `KVEventsConfig` names them. Raises ValueError."""

    endpoint: str
    replay_endpoint: str = ""
    """Where batches that were missed can be read; empty: nowhere."""
    topic: str = ""
    """The beginning of the topics that count; empty: all."""
    ranks: int = 1
    """Data-parallel ranks of vLLM, or replicas of a Penstock: the number of each is added to the ports."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= _MOST_RANKS:
            raise ValueError(f"kv_events: ranks: from 1 to {_MOST_RANKS}")
        for name, endpoint in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if not endpoint and name != "endpoint":
                continue
            if _tcp_host(endpoint) in (None, "", "*") or _tcp_host(_moved(endpoint, self.ranks - 1)) is None:
                raise ValueError(f"kv_events: {name}: {endpoint!r}: it is tcp://HOST:PORT")

    def of_ranks(self) -> list[KVEventsSource]:
        return [
            KVEventsSource(
                endpoint=_moved(self.endpoint, rank),
                replay_endpoint=self.replay_endpoint and _moved(self.replay_endpoint, rank),
                topic=self.topic,
            )
            for rank in range(self.ranks)
        ]


def _check(name: str, endpoint: str) -> None:
    host = _tcp_host(endpoint)
    if host == "*":
        return
    try:
        ipaddress.ip_address((host or "").removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ValueError(f"{name}: {endpoint!r}: {_FORM}") from None


def _tcp_host(endpoint: str) -> str | None:
    """None for what is not tcp://HOST:PORT."""
    parts = urlsplit(endpoint)
    host, _, port = parts.netloc.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536
    return host if parts.scheme == "tcp" and is_port and not parts.path else None


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _moved(endpoint: str, ports: int) -> str:
    return f"{endpoint.rpartition(':')[0]}:{_port(endpoint) + ports}"


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).netloc.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return host != "*" and ipaddress.ip_address(host).is_loopback
