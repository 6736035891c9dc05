"""What a protocol writes of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.gateway.llm.dataplane import ChoiceDelta

COMMENT = b": keep-alive\n\n"
"""Clients pass over it."""


class StreamFrames(Protocol):
    """Renders the deltas of one call as server-sent events."""

    live: int
    """Choices whose end has not been rendered."""
    heartbeat: bytes
    """Sent when there is nothing else for some time."""

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Empty when none of them has anything to show."""
        ...
