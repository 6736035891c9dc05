"""Autoscaling by what waits, runs and is in the KV caches, for Ray Serve."""

from __future__ import annotations

from typing import Any

from penstock.gateway.ray_serve.load import replicas_for
from penstock.gateway.ray_serve.settings import Autoscaling, read_ray_settings


class LoadPolicy:
    """Serve's `AutoscalingPolicy`: called every few seconds with the figures of all replicas. Serve applies delays and
    bounds afterwards."""

    def __init__(self, **autoscaling: Any) -> None:
        """The fields of `Autoscaling`. Raises ConfigError."""
        settings = read_ray_settings({"autoscaling": autoscaling}).autoscaling
        self._targets = settings or Autoscaling()

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        figures = context.aggregated_metrics or {}
        loads = {name: list(values.values()) for name, values in figures.items()}
        replicas = replicas_for(loads, context.total_queued_requests or 0.0, context.target_num_replicas, self._targets)
        return replicas, {}
