"""Whether the body of a request comes fast enough."""

from __future__ import annotations

from penstock.gateway.http.limits import ConnectionLimits

_SHORTEST_LOOK = 0.1
"""Seconds between two looks at a body."""


class BodyPace:
    """Of the body that is being received. Times are those of the event loop."""

    __slots__ = ("_begun", "_last_piece", "_limits", "_num_bytes")

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._begun = self._last_piece = 0.0
        self._num_bytes = 0

    def begin(self, now: float) -> None:
        """The head has come, and the body is next."""
        self._begun = self._last_piece = now
        self._num_bytes = 0

    def received(self, now: float, num_bytes: int) -> None:
        self._last_piece = now
        self._num_bytes += num_bytes

    def not_read(self, now: float) -> None:
        """The server has not read since the last piece: that time is not the client's."""
        self._begun += now - self._last_piece
        self._last_piece = now

    def seconds_left(self, now: float) -> float:
        """After which to look again; 0: the client has been idle, or the body under way, for too long."""
        limits = self._limits
        taken = now - self._begun
        rest = self._last_piece + limits.body_idle_timeout - now
        too_slow = taken - limits.body_idle_timeout > self._num_bytes / limits.body_rate
        if rest <= 0 or too_slow or taken >= limits.body_timeout:
            return 0.0
        return min(rest, max(_SHORTEST_LOOK, limits.body_timeout - taken))
