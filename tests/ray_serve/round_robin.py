"""What routing by prefix is compared with."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter


class RoundRobinRouter(RequestRouter):
    turn = 0

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        ordered = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        self.turn += 1
        first = self.turn % len(ordered)
        return [[replica] for replica in ordered[first:] + ordered[:first]]
