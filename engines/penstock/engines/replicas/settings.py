"""How requests are spread over replicas, and what becomes of those whose replica dies."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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
