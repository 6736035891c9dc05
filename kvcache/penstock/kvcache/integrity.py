"""The error that `check_integrity` raises, and the check that raises it."""

from __future__ import annotations


class IntegrityError(AssertionError):
    """The book-keeping contradicts itself: always a bug here, never the caller's fault."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
