"""What operators see of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.engines.contract.engine_stats import EngineStats


@dataclass(slots=True)
class MoveCounts:
    """Samples that did not stay where they were, since the start."""

    failed_over: int = 0
    """That had no token yet when their replica died or refused them, and went to another one."""
    resumed: int = 0
    """That went on behind their tokens."""
    given_up: int = 0
    """That ended with an error since their replica had died."""
    handed_over: int = 0
    """That went on at a decode replica behind the first token of a prefill replica."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    replica: int
    """Its number."""
    role: str
    """prefill, decode, or any."""
    ready: bool
    failed: bool
    restarts: int
    """How often all that it held was lost."""
    routed: int
    """Samples that it was sent."""
    known_prefix_blocks: int
    """Blocks of prompts that it was sent and probably has cached."""
    missing_adapters: int
    """That it has yet to load."""
    stats: EngineStats
    """Its own."""


@runtime_checkable
class Replicated(Protocol):
    """An engine that is several."""

    @property
    def moves(self) -> MoveCounts: ...

    @property
    def has_roles(self) -> bool:
        """Some of its engines compute prompts for the others."""
        ...

    def replica_states(self) -> list[ReplicaState]: ...
