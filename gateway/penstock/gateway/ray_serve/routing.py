"""The choice of a replica for a request: plain data, without Ray.

A replica that has seen a prompt's beginning has it in its prefix cache. So a request goes to where most of its key has
been before, as long as that replica is not much busier than the others. Everything else goes to the least busy one: a
prompt of which only the system prompt is known costs that part once on each replica.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from math import ceil
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

READY = "ready"
"""Among what a replica tells routers: false while it could not serve, for instance without its engine."""
_MOST_HASHES = 200_000
_ROOM = 4
"""Requests that a replica may always have more than the least busy one."""
_FACTOR = 1.5
"""And beyond them, how many times the mean of all."""
_LEAST_KNOWN = 0.3
"""Share of the key that must have been somewhere to count. Less than half, since a second turn may more than double a
conversation; 0.3 is what SGLang's gateway takes."""


class RouteTable(Generic[Replica]):
    """One proxy's knowledge: what it has sent where."""

    def __init__(self, most_hashes: int = _MOST_HASHES) -> None:
        self._most = most_hashes
        self._seen: OrderedDict[str, Replica] = OrderedDict()
        """Where a hash was sent last; the longest unused goes first."""
        self._sent: Counter[Replica] = Counter()

    def __len__(self) -> int:
        return len(self._seen)

    def choose(
        self, key: Sequence[str], loads: Mapping[Replica, int], avoid: Collection[Replica] = ()
    ) -> list[Replica]:
        """All replicas of `loads`, the best one first. `key` has the shortest beginning first; `loads` says how many
        requests each replica has. Those to `avoid` come last."""
        ranked = sorted(loads, key=lambda replica: (replica in avoid, loads[replica], self._sent[replica]))
        known = self._known(key, loads)
        if known is not None and known not in avoid and not _is_busy(known, loads):
            ranked.remove(known)
            ranked.insert(0, known)
        return ranked

    def _known(self, key: Sequence[str], loads: Mapping[Replica, int]) -> Replica | None:
        enough = ceil(len(key) * _LEAST_KNOWN)
        for prefix in reversed(key[max(0, enough - 1) :]):
            replica = self._seen.get(prefix)
            if replica is not None and replica in loads:
                return replica
        return None

    def sent(self, key: Sequence[str], replica: Replica) -> None:
        """Notes where a request went. Of a beginning that several replicas have, the newest one is known."""
        self._sent[replica] += 1
        for prefix in key:
            self._seen[prefix] = replica
            self._seen.move_to_end(prefix)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def keep(self, replicas: frozenset[Replica]) -> None:
        """Forgets all others: they have ended."""
        gone = [prefix for prefix, replica in self._seen.items() if replica not in replicas]
        for prefix in gone:
            del self._seen[prefix]
        self._sent = Counter({replica: count for replica, count in self._sent.items() if replica in replicas})


def _is_busy(replica: Replica, loads: Mapping[Replica, int]) -> bool:
    mean = sum(loads.values()) / len(loads)
    return loads[replica] > min(loads.values()) + _ROOM and loads[replica] > _FACTOR * mean
