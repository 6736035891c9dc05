"""Ray Serve's request router by prefix and session: the rules are those of `routing`, the keys come from the proxy."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from penstock.gateway.ray_serve.prefix_key import RouteKey
from penstock.gateway.ray_serve.routing import READY, RouteTable


class PrefixRouter(RequestRouter):
    """One in each proxy; each learns from what it routes itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table: RouteTable[ReplicaID] = RouteTable()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """In ranks of one: Serve takes the first that has a place."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {replica_id: self._replica_queue_len_cache.get(replica_id) or 0 for replica_id in by_id}
        key = _key(pending_request)
        avoid = [
            replica_id
            for replica_id, replica in by_id.items()
            if replica_id.unique_id in key.avoid or not replica.routing_stats.get(READY, True)
        ]
        return [[by_id[replica_id]] for replica_id in self._table.choose(key.hashes, loads, avoid)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._table.sent(_key(pending_request).hashes, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.keep(frozenset(replica.replica_id for replica in replicas))


def _key(request: PendingRequest | None) -> RouteKey:
    return RouteKey.read((request.metadata.session_id if request is not None else "") or "")
