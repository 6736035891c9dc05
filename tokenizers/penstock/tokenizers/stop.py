"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import copy

from .errors import TokenizerError


class _State:
    """A prefix of a stop string: the longest that the text so far ends with.

    A state of the automaton of Aho and Corasick (1975). States are made where a text leads, because all states of many
    strings take milliseconds and megabytes, and most stop strings never begin.
    """

    __slots__ = ("_stops", "depth", "fallback", "match", "next")

    def __init__(self, depth: int, stops: Sequence[str], fallback: _State | None) -> None:
        self._stops = stops
        """Those that begin with this prefix, sorted; none once `next` is known."""
        self.depth = depth
        """Its length in characters."""
        self.next = _UNKNOWN
        """The prefixes that are one character longer."""
        self.fallback = fallback
        """The longest shorter prefix of any stop string that this one ends with; None for the empty prefix."""
        self.match: str | None = None if fallback is None else fallback.match
        """The longest stop string that the text ends with in this state."""
        if stops and len(stops[0]) == depth:
            self.match = stops[0]

    def grow(self) -> None:
        """Makes `next` known, here and of all fallbacks. For a whole automaton that costs no more than linear in the
        characters of the stop strings."""
        unknown: list[_State] = []
        state: _State | None = self
        while state is not None and state.next is _UNKNOWN:
            unknown.append(state)
            state = state.fallback
        for state in reversed(unknown):
            state._branch()

    def _branch(self) -> None:
        branches: dict[str, list[str]] = {}
        for stop in self._stops:
            if len(stop) > self.depth:
                branches.setdefault(stop[self.depth], []).append(stop)
        self.next = {char: _State(self.depth + 1, stops, self._ending(char)) for char, stops in branches.items()}
        self._stops = ()

    def _ending(self, char: str) -> _State:
        """The fallback of this prefix with one more character."""
        state = self
        while state.fallback is not None:
            state = state.fallback
            if char in state.next:
                return state.next[char]
        return state


_UNKNOWN: dict[str, _State] = {}


def _any_of(chars: Iterable[str]) -> re.Pattern[str]:
    """Finds the characters. If one of them is beyond U+FFFF, it finds all that are: `re` would compare each character
    of a text with every one of those; the others it looks up."""
    escaped = {re.escape(char) if char <= "\uffff" else "\U00010000-\U0010ffff" for char in chars}
    return re.compile(f"[{''.join(escaped)}]")


class StopStrings:
    """Passes text on up to the first stop string.

    The match is the one that begins earliest, and among those that begin at the same place the one that is complete
    first. Which one that is does not depend on how the text is cut into pieces. Costs are linear in the text, however
    many stop strings there are. Raises TokenizerError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise TokenizerError("a stop string must not be empty")
        self._root = _State(0, sorted(set(stops)), None)
        self._root.grow()
        self._include_stop = include_stop
        self._first = _any_of(self._root.next) if stops else None
        self._state = self._root
        self._held = ""
        self._match: tuple[int, str] | None = None
        """(where it begins in the held text, stop string) of a complete match, while one that begins earlier is
        possible."""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def unused(self) -> StopStrings:
        """The same for another text, with the same automaton. Only while this one has seen no text."""
        return copy(self)

    def push(self, text: str) -> tuple[str, str | None]:
        """(the text that can go out now, the stop string if that has ended the text). After an end always no text."""
        if self.matched is not None:
            return "", self.matched
        if self._first is None:
            return text, None
        buffer = self._held + text
        position = len(self._held)
        while position < len(buffer):
            if self._state is self._root:
                start = self._first.search(buffer, position)
                if start is None:
                    break
                position = start.start()
            self._advance(buffer[position])
            position += 1
            if (self._state.match is not None or self._match is not None) and self._update_match(position):
                return self._end(buffer), self.matched
        return self._release(buffer), None

    def flush(self) -> str:
        """The text held back, once the text has ended. Sets `matched` if there is a match in it; without one, another
        text may follow."""
        if self._match is not None:
            return self._end(self._held)
        held, self._held, self._state = self._held, "", self._root
        return held

    def _advance(self, char: str) -> None:
        state: _State | None = self._state
        while state is not None:
            following = state.next.get(char)
            if following is not None:
                if following.next is _UNKNOWN:
                    following.grow()
                self._state = following
                return
            state = state.fallback
        self._state = self._root

    def _update_match(self, end: int) -> bool:
        """Notes a match that ends at `end`. True once no match can begin before the one that is noted."""
        stop = self._state.match
        if stop is not None and (self._match is None or end - len(stop) < self._match[0]):
            self._match = end - len(stop), stop
        return self._match is not None and end - self._state.depth >= self._match[0]

    def _release(self, buffer: str) -> str:
        out = len(buffer) - self._state.depth
        if self._match is not None:
            # A match that begins earlier is under way, so `out` lies before the match found.
            self._match = self._match[0] - out, self._match[1]
        self._held = buffer[out:]
        return buffer[:out]

    def _end(self, buffer: str) -> str:
        start, self.matched = self._match or (len(buffer), None)
        self._match, self._held, self._state = None, "", self._root
        return buffer[:start] + (self.matched or "" if self._include_stop else "")
