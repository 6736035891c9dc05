"""What the time of another machine's clock is by this machine's."""

from __future__ import annotations


class RemoteClock:
    """Estimates the difference by questions and answers (RFC 5905, 8): the answer with the shortest way there and back
    tells it best, and newer ones count more since clocks drift apart."""

    _AGEING = 1e-4
    """Seconds of uncertainty that each second adds: clocks differ by less than 100 ppm."""

    def __init__(self) -> None:
        self._difference = 0.0
        """Of this clock and the other one."""
        self._uncertainty = float("inf")
        self._heard_at = 0.0

    def heard(self, asked_at: float, theirs: float, now: float) -> None:
        """The other clock's time came back at `now` for a question of `asked_at`."""
        uncertainty = (now - asked_at) / 2
        if uncertainty <= self._uncertainty + (now - self._heard_at) * self._AGEING:
            difference = (asked_at + now) / 2 - theirs
            self._difference = 0.0 if abs(difference) <= uncertainty else difference  # one clock, most likely
            self._uncertainty, self._heard_at = uncertainty, now

    def local(self, theirs: float) -> float:
        return theirs + self._difference
