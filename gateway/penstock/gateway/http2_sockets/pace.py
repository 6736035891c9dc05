"""How fast clients have to send, and to take what is sent to them: one rule for all protocols."""

from __future__ import annotations

_SLOWEST = 1024
"""Bytes per second. Below this, readers are all the same."""


class BodyPace:
    """A body or message that has begun to come. Looked at about once a second; times are those of the loop."""

    __slots__ = ("_grace", "_idle", "_looked", "_max_idle", "_rate", "_seconds", "_seen", "_waited")

    def __init__(self, grace: float, rate: float, seconds: float, now: float, max_idle: float = float("inf")) -> None:
        """After `grace` seconds each further second must have brought `rate` bytes on average. All of it may take
        `seconds`, and `max_idle` may pass without any byte."""
        self._grace = grace
        self._max_idle = max_idle
        self._rate = rate
        self._seconds = seconds
        self._looked = now
        self._waited = self._idle = 0.0
        """Seconds in which it was waited for, and since then any of it came."""
        self._seen = 0
        """Bytes that had come when it was last looked at."""

    def late(self, now: float, received: int, *, waited: bool) -> bool:
        """`received` bytes have come so far. Where nobody `waited` for them since the last look, that time is not the
        client's."""
        seconds, self._looked = now - self._looked, now
        if not waited:
            return False
        self._waited += seconds
        self._idle = self._idle + seconds if received == self._seen else 0.0
        self._seen = received
        too_slow = self._waited - self._grace > received / self._rate
        return self._idle > self._max_idle or too_slow or self._waited > self._seconds


class ReaderPace:
    """A client that has to take what is written for it. Looked at about once a second."""

    __slots__ = ("_taken", "_taken_at", "_waiting", "seconds_to_read")

    def __init__(self, now: float) -> None:
        self._taken = 0
        """Bytes that the client had taken when that was last looked at."""
        self._taken_at = now
        self._waiting = 0
        """Bytes that waited for the client then."""
        self.seconds_to_read = 0.0
        """That the client needs for those of them that still wait, as fast as it has taken some since."""

    def idle_seconds(self, now: float, taken: int, unwritten: int, held: int = 0) -> float:
        """Since the client took any. It has taken so many bytes so far, `unwritten` wait for it in the socket, and
        `held` behind those."""
        moved = taken - self._taken
        self.seconds_to_read = max(0, self._waiting - moved) / (moved + _SLOWEST)
        self._waiting = held + unwritten
        if not unwritten or moved:
            self._taken, self._taken_at = taken, now
        return now - self._taken_at
