"""Settings of replicas, and what operators see of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

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


class RoutingPolicy(StrEnum):
    PREFIX = "prefix"
    """Where the least has to be computed first: the rest of the prompt, and what others have asked for."""
    LEAST_LOADED = "least-loaded"
    """The same without a look at prefixes and sessions."""
    ROUND_ROBIN = "round-robin"
    """In turn."""


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    policy: RoutingPolicy = RoutingPolicy.PREFIX
    resume: bool = True
    """A request that has put out tokens goes on at another replica when its own dies; else it ends with an error."""
    resume_required: bool = False
    """The start fails where an engine cannot do that."""
    resume_wait: float = 60.0
    """Seconds for which such a request waits for a replica that can take it."""
    num_prefill: int = 0
    """The first ones of the replicas compute prompts, for the others (`Roles`). They share memory."""
    handover_min_tokens: int = 128
    """Prompts of which less has to be computed are not handed over."""
