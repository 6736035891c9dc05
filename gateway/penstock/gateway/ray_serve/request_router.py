"""Ray Serve's request router by prefix and session: the rules are those of `routing`, the keys come from the proxy."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from penstock.gateway.ray_serve.prefix_key import MARK, session_key
from penstock.gateway.ray_serve.routing import RouteTable


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
        found = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {each: self._replica_queue_len_cache.get(each) or 0 for each in found}
        return [[found[each]] for each in self._table.choose(_key(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._table.sent(_key(pending_request), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.keep(frozenset(replica.replica_id for replica in replicas))


def _key(request: PendingRequest | None) -> list[str]:
    session: str = (request.metadata.session_id if request is not None else "") or ""
    if session.startswith(MARK):
        return session.removeprefix(MARK).split(".")
    return [session_key(session)] if session else []  # of gRPC, whose requests no guard has seen
