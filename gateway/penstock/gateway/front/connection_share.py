"""What the requests of one connection hold of the server's memory for requests."""

from __future__ import annotations

from penstock.gateway.front.intake import SMALL_BODY, BodyBudget

_STEP = 128 << 10
_SPARE = 2 * _STEP


class ConnectionShare:
    """For connections with many requests at a time. The first 64 KiB are free, as they are for a connection that has
    one request. What is above them is taken from the sum in steps, so that small requests do not touch it each time."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0
        self._covered = SMALL_BODY
        """Free, or taken from the sum."""

    def take(self, size: int) -> None:
        """Raises OverloadedError, and then takes nothing."""
        held = self._held + size
        if held > self._covered:
            more = -(-(held - self._covered) // _STEP) * _STEP
            self._budget.take(more)
            self._covered += more
        self._held = held

    def give_back(self, size: int) -> None:
        self._held -= size
        if self._covered > SMALL_BODY and (not self._held or self._covered - self._held > _SPARE):
            spare = (self._covered - max(self._held, SMALL_BODY)) // _STEP * _STEP
            self._covered -= spare
            self._budget.give_back(spare)
