"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import TokenizerError


@dataclass(slots=True, eq=False)
class _State:
    """A prefix of a stop string: the longest that the text so far ends with."""

    depth: int
    """Its length in characters."""
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    """The longest shorter prefix of any stop string that this one ends with; None for the empty prefix."""
    match: str | None = None
    """The longest stop string that the text ends with in this state."""


class StopStrings:
    """Passes text on up to the first stop string.

    The match is the one that begins earliest, and among those that begin at the same place the one that is complete
    first. Which one that is does not depend on how the text is cut into pieces. Costs are linear in the text.
    Raises TokenizerError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise TokenizerError("a stop string must not be empty")
        self._root = _build(stops)
        self._include_stop = include_stop
        self._first = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]") if stops else None
        self._state = self._root
        self._held = ""
        self._match: tuple[int, str] | None = None
        """(where it begins in the held text, stop string) of a complete match, while one that begins earlier is
        possible."""
        self.matched: str | None = None
        """The stop string that ended the text."""

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
            if self._update_match(position):
                return self._end(buffer), self.matched
        return self._release(buffer), None

    def flush(self) -> str:
        """The text held back, once generation has ended. Sets `matched` if there is a match in it."""
        if self._match is not None:
            return self._end(self._held)
        held, self._held, self._state = self._held, "", self._root
        return held

    def _advance(self, char: str) -> None:
        state: _State | None = self._state
        while state is not None:
            following = state.next.get(char)
            if following is not None:
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


def _build(stops: Sequence[str]) -> _State:
    """The automaton of Aho and Corasick (1975) over the stop strings."""
    root = _State(0)
    for stop in stops:
        state = root
        for char in stop:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.match = stop
    queue = deque((root,))
    while queue:
        state = queue.popleft()
        for char, following in state.next.items():
            queue.append(following)
            fallback = state.fallback
            while fallback is not None and char not in fallback.next:
                fallback = fallback.fallback
            following.fallback = root if fallback is None else fallback.next[char]
            if following.match is None:
                following.match = following.fallback.match
    return root
