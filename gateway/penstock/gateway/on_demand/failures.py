"""Loads that failed, and when they may be tried again. Plain data: times are passed in."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE = 10.0
LONGEST_PAUSE = 300.0


@dataclass(slots=True)
class Failure:
    reason: str
    pause: float
    """Seconds."""
    until: float


class Failures:
    """Of each model, the last load if it failed. Each further failure in a row doubles the pause."""

    def __init__(self) -> None:
        self._by_name: dict[str, Failure] = {}

    def add(self, name: str, reason: str, now: float) -> Failure:
        before = self._by_name.pop(name, None)
        pause = FIRST_PAUSE if before is None else min(2 * before.pause, LONGEST_PAUSE)
        failure = self._by_name[name] = Failure(reason, pause, now + pause)
        return failure

    def current(self, name: str, now: float) -> Failure | None:
        """While the model may not be tried again."""
        failure = self._by_name.get(name)
        return failure if failure is not None and now < failure.until else None

    def forget(self, name: str) -> None:
        """It has been loaded, or a load was asked for."""
        self._by_name.pop(name, None)
