"""Which characters can stand beside each other inside one match of a pattern.

The pattern's tree becomes positions, one for each place that consumes a character, and the positions that can follow
each of them (Glushkov's construction). That is more than the pattern can match in the end, never less.
"""

from __future__ import annotations

from collections.abc import Iterable

from .pattern_syntax import Chars, Choice, Lookahead, Node, PatternReader, Repeat, Sequence, Test, UnknownPattern

_MOST_COPIES = 16


class Pattern:
    """Raises UnknownPattern for one that cannot be judged."""

    def __init__(self, source: str) -> None:
        reader = PatternReader(source)
        self.tree = reader.read()
        self.named = reader.named
        self._possessive = reader.possessive
        self._tests: list[Test | None] = []
        """Of each position; None: a lookahead."""
        self._follow: list[set[int]] = []
        nullable, self._first, self._last = self._add(self.tree)
        lookaheads = {position for position, test in enumerate(self._tests) if test is None}
        if nullable or any(self._follow[position] or position in self._first for position in lookaheads):
            raise UnknownPattern(f"an empty match, or a lookahead that is not at the end: {source!r}")
        self._before_lookahead = {x for x, after in enumerate(self._follow) if after & lookaheads}

    def positions(self, chars: Iterable[str]) -> set[int]:
        """Those that match any of the characters."""
        chars = list(chars)
        return {x for x, test in enumerate(self._tests) if test is not None and any(map(test, chars))}

    def joins(self, left: set[int], right: set[int]) -> bool:
        """Whether a match could go on from a position of `left` to one of `right`, or look at what is behind `left`."""
        return bool(left & self._before_lookahead) or any(self._follow[x] & right for x in left)

    def always_matches(self, chars: Iterable[str]) -> bool:
        """Whether each of the characters is part of some match, whatever stands around it."""
        return all(self._matches_alone(char) for char in chars)

    def _matches_alone(self, char: str) -> bool:
        first = self.positions([char]) & self._first
        # With possessive quantifiers the way that a match takes first could be a dead end.
        return first <= self._last and bool(first) if self._possessive else bool(first & self._last)

    def _add(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """(can be empty, first positions, last positions) of a part of the tree; notes who follows whom."""
        match node:
            case Chars(test):
                return self._position(test)
            case Lookahead():
                return self._position(None)
            case Choice(options):
                parts = [self._add(option) for option in options]
                return (
                    any(p[0] for p in parts),
                    set().union(*(p[1] for p in parts)),
                    set().union(*(p[2] for p in parts)),
                )
            case Sequence(nodes):
                return self._sequence(nodes)
            case Repeat(inner, least, most):
                return self._repeat(inner, least, most)

    def _position(self, test: Test | None) -> tuple[bool, set[int], set[int]]:
        self._tests.append(test)
        self._follow.append(set())
        here = {len(self._tests) - 1}
        return False, here, here

    def _sequence(self, nodes: Iterable[Node]) -> tuple[bool, set[int], set[int]]:
        nullable, first, last = True, set[int](), set[int]()
        for node in nodes:
            empty, starts, ends = self._add(node)
            self._link(last, starts)
            first = first | starts if nullable else first
            last = last | ends if empty else ends
            nullable = nullable and empty
        return nullable, first, last

    def _repeat(self, node: Node, least: int, most: int | None) -> tuple[bool, set[int], set[int]]:
        if max(least, most or 0) > _MOST_COPIES:
            raise UnknownPattern("a repetition of many")
        if (least, most) == (0, 1):
            _, first, last = self._add(node)
            return True, first, last
        if most is None and least <= 1:
            nullable, first, last = self._add(node)
            self._link(last, first)
            return nullable or least == 0, first, last
        copies = [node] * least
        copies += [Repeat(node, 0, None)] if most is None else [Repeat(node, 0, 1)] * (most - least)
        return self._sequence(copies)

    def _link(self, before: set[int], after: set[int]) -> None:
        for position in before:
            self._follow[position] |= after
