"""A bound on the work that schemas make: short ones can say much, where what they repeat is repeated inside of them."""

from __future__ import annotations

_MOST = 1 << 23
_LEAST = 64
"""Of each step."""


class Effort:
    """What is left of it, in characters that are read. About a second."""

    def __init__(self) -> None:
        self._left = _MOST

    def spend(self, chars: int = 0) -> None:
        """Before each step. Raises ValueError when nothing is left."""
        self._left -= chars + _LEAST
        if self._left < 0:
            raise ValueError("the schema takes too long to put in other words")
