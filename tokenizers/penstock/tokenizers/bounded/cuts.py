"""Places where a text can be cut without changing its tokens."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable

from .cut_kinds import Kind

_WINDOW = 65536
"""Characters searched in one call, which does not let other threads run."""
_GROUPS = 64
_DIGIT_RUN = re.compile("[0-9]+")


class Cuts:
    def __init__(self, pairs: Iterable[tuple[Kind, Kind]], digits: int | None, tokens: Iterable[str]) -> None:
        """A text can be cut between the kinds of each of `pairs`, and in a run of digits behind each `digits` of them;
        but not inside one of the added `tokens`."""
        self._between = _between(pairs)
        self._digits = digits
        self._tokens = _by_neighbours(tokens)

    def next(self, text: str, start: int, at: int, until: int) -> int | None:
        """The first place from `at` on and about before `until` where `text[start:]` can be cut.

        `start` is such a place itself, or 0."""
        return self._in_digits(text, start, at) or self._between_kinds(text, at, until)

    def _between_kinds(self, text: str, at: int, until: int) -> int | None:
        if self._between is None:
            return None
        for low in range(at, until, _WINDOW):
            for match in self._between.finditer(text, low, min(low + _WINDOW, until)):
                if not self._inside_token(text, match.start()):
                    return match.start()
        return None

    def _in_digits(self, text: str, start: int, at: int) -> int | None:
        if self._digits is None:
            return None
        run = _DIGIT_RUN.match(text, at, at + _GROUPS * self._digits)
        before = text[start:at].rstrip(string.digits)
        if run is None or (before and not before[-1].isascii()):  # that could be a digit of another script
            return None
        first = start + len(before)
        places = range(at + (first - at) % self._digits, run.end(), self._digits)
        return next((place for place in places if place > first and not self._inside_token(text, place)), None)

    def _inside_token(self, text: str, at: int) -> bool:
        around = self._tokens.get(text[at - 1 : at + 1], ())
        return any(text.startswith(token, at - place) for token, place in around if at >= place)


def _by_neighbours(contents: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
    """(content, place inside it) for the two characters around that place."""
    found: dict[str, list[tuple[str, int]]] = {}
    for content in contents:
        for place, (one, two) in enumerate(itertools.pairwise(content), start=1):
            found.setdefault(one + two, []).append((content, place))
    return found


def _between(pairs: Iterable[tuple[Kind, Kind]]) -> re.Pattern[str] | None:
    """One alternative for all left sides that have the same right sides."""
    rights: dict[str, str] = {}
    for left, right in pairs:
        rights[left.chars] = rights.get(left.chars, "") + right.chars
    lefts: dict[str, str] = {}
    for left_chars, right_chars in rights.items():
        lefts[right_chars] = lefts.get(right_chars, "") + left_chars
    options = [f"(?<=[{left_chars}])(?=[{right_chars}])" for right_chars, left_chars in lefts.items()]
    return re.compile("|".join(options)) if options else None
