"""Bytes of other servers' answers that are in memory until more of them has come. Each may be large; together they
have a bound."""

from __future__ import annotations

from penstock.engines.errors import OverloadedError

_SMALL = 64 << 10
"""Bytes. What an answer holds up to this is not counted: connections hold more."""


class HeldAnswers:
    """Plain data, for the event loop."""

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        self.limit = limit
        self.held = 0


class HeldAnswer:
    """The part of one answer."""

    def __init__(self, answers: HeldAnswers) -> None:
        self._answers = answers
        self._size = 0

    def note(self, size: int) -> None:
        """The answer holds so many bytes now; 0 at its end. Raises OverloadedError."""
        counted = size if size > _SMALL else 0
        answers = self._answers
        held = answers.held + counted - self._size
        if counted > self._size and held > answers.limit:
            message = (
                f"{answers.held} bytes of other servers' answers are in memory, and this one has no room beside them."
            )
            raise OverloadedError(message, retry_after=1)
        answers.held, self._size = held, counted
