"""Request headers that go to the model as parameters (`--http-header-forward-pattern` and its gRPC twin)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.kserve.parameters import RESERVED

MAX_PATTERN = 512
MAX_HEADERS = 64
"""That a request may forward."""

_MAX_NAME = 128
"""Longer names match no pattern."""
_MAX_REPEATS = 2
"""Of unbounded length, in one alternative: with the length of names they bound the time that matching takes."""
_CASE = "(?-i)"
_NOT_LINEAR = re.compile(r"\\[1-9]|\(\?(?!:|P<|i\))|[*+?}]\+|\)(?:[*+]|\{)")
"""Repeated groups, and the back references, look-arounds and the rest that RE2, whose syntax Triton takes, lacks."""
_REPEAT = re.compile(r"[*+]|\{\d*,\d*\}")


class NeverMatches(ValueError):
    """A pattern that no name of a header can match."""


def forward_pattern(text: str) -> re.Pattern[str] | None:
    """The pattern of an operator's setting; None for an empty one.

    It has to match the whole name of a header, whatever its case unless it begins with `(?-i)`. Raises ValueError when
    it is no regular expression and when matching it could take long, NeverMatches when it could never match.
    """
    if not text:
        return None
    pattern = text.removeprefix(_CASE)
    plain = re.sub(r"\\[^1-9]", "x", pattern)
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a header pattern may have at most {MAX_PATTERN} characters")
    if _NOT_LINEAR.search(plain):
        raise ValueError(f"the header pattern '{text}' has repeated groups, back references or look-arounds")
    if any(len(_REPEAT.findall(branch)) > _MAX_REPEATS for branch in plain.split("|")):
        raise ValueError(f"the header pattern '{text}' has more than {_MAX_REPEATS} repeats in one alternative")
    if text.startswith(_CASE) and plain != plain.lower():
        raise NeverMatches(f"the header pattern '{text}' never matches: names of headers arrive in small letters")
    try:
        return re.compile(pattern, 0 if text.startswith(_CASE) else re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the header pattern '{text}' is no regular expression: {error}") from None


def forwarded(headers: Iterable[tuple[str, str]], pattern: re.Pattern[str]) -> dict[str, str]:
    """The matching headers (or metadata) as parameters; of several with one name the first.

    Raises InvalidRequestError for names that are reserved as parameters, and for too many headers.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        if len(name) > _MAX_NAME or pattern.fullmatch(name) is None:
            continue
        if name in RESERVED or name.startswith("triton_"):
            raise InvalidRequestError(f"the header '{name}' cannot be forwarded: its name is reserved as a parameter")
        found.setdefault(name, value)
        if len(found) > MAX_HEADERS:
            raise InvalidRequestError(f"a request may forward at most {MAX_HEADERS} headers")
    return found


def forwarded_http(headers: Iterable[tuple[bytes, bytes]], pattern: re.Pattern[str]) -> dict[str, str]:
    """`forwarded` for the headers of an ASGI scope."""
    return forwarded(((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers), pattern)
