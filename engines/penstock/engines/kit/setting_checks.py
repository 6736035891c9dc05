"""Checks of an engine's settings. All raise InvalidRequestError that names the setting and what it may be."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.errors import InvalidRequestError


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidRequestError(f"{name}={value!r} is not one of {', '.join(allowed)}", param=name)


def check_positive(settings: object, *names: str, optional: bool = False) -> None:
    """That they are integers from 1 on; with `optional` also None."""
    for name in names:
        value = getattr(settings, name)
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequestError(f"{name}={value!r} is not a positive integer", param=name)
