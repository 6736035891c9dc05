"""How models are loaded on demand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandSettings:
    wait_seconds: float = 300.0
    """The longest that a request waits for its model."""
    most_waiting: int = 1024
    """Requests that wait at the same time, for all models together."""
    idle_seconds: float = 0.0
    """A model that nobody has used for so long is unloaded; 0: none is."""
