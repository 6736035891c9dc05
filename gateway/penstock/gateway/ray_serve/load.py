"""The load of a replica, and the number of replicas that a load needs: plain numbers, without Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from penstock.engines.contract.engine_stats import EngineStats
from penstock.gateway.ray_serve.settings import Autoscaling

_TOLERANCE = 0.1
"""So little above or below its target, a load changes nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    waiting: float
    """Requests in the queues of the replica's engines."""
    running: float
    """Share of the places for running requests, of the fullest engine."""
    kv_usage: float
    """Share of the KV cache, of the fullest engine."""

    def figures(self) -> dict[str, float]:
        return asdict(self)


def load_of(engines: Sequence[EngineStats], max_num_seqs: int) -> Load:
    return Load(
        waiting=float(sum(stats.num_waiting for stats in engines)),
        running=max((stats.num_running / max_num_seqs for stats in engines), default=0.0),
        kv_usage=max(
            (1 - stats.num_free_blocks / stats.num_blocks for stats in engines if stats.num_blocks), default=0.0
        ),
    )


def replicas_for(
    loads: Mapping[str, Sequence[float]], queued_at_proxies: float, replicas: int, targets: Autoscaling
) -> int:
    """How many replicas bring all figures to their targets. `loads` has the replicas' values of each field of Load.

    Each figure alone asks for `replicas x mean / target`, as Kubernetes' HorizontalPodAutoscaler does; the highest
    counts.
    """
    ratios = [
        (_sum(loads, "waiting") + queued_at_proxies) / targets.target_waiting,
        _sum(loads, "running") / targets.target_running,
        _sum(loads, "kv_usage") / targets.target_kv_usage,
    ]
    count = max(ratios)
    if replicas and abs(count / replicas - 1) <= _TOLERANCE:
        count = replicas
    return min(targets.max_replicas, max(targets.min_replicas, math.ceil(count)))


def _sum(loads: Mapping[str, Sequence[float]], name: str) -> float:
    return sum(loads.get(name, ()))
