"""How many requests may be tried again: a part of all, so that retries cannot multiply the load of a server in
trouble."""

from __future__ import annotations

_MOST = 10.0
"""What may be saved up. It is there at the beginning, too: the first failure of a quiet server may be tried again."""


class RetryBudget:
    """Plain data, without a clock."""

    def __init__(self, ratio: float) -> None:
        """`ratio`: retries for each request; 0: none ever."""
        self._ratio = ratio
        self._left = _MOST if ratio else 0.0

    def asked(self) -> None:
        """There is a new request."""
        self._left = min(_MOST, self._left + self._ratio)

    def take(self) -> bool:
        """Whether a request may be tried again now; then it counts."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
