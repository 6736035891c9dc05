"""The health of a server, as probes are told on every port: HTTP and gRPC, OpenAI's paths and Triton's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


def _yes() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ServerHealth:
    live: Callable[[], bool] = _yes
    """False: only a new process can help. A busy server is live, and so is one that drains."""
    ready: Callable[[], bool] = _yes
    """Whether new requests should come here: loaded, answering, not about to stop."""
    loading: Callable[[], Mapping[str, str]] = dict
    """What is being loaded, and how far it is."""


def is_live(failed: list[bool], others_ready: bool, *, strict: bool) -> bool:
    """`failed` says of each language model whether its engine is down for good; `others_ready`, whether any model of
    the server is ready. A dead model is its own trouble while the server has another, unless `strict`."""
    if not any(failed):
        return True
    return not strict and (not all(failed) or others_ready)
