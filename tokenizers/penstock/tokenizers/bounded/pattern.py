"""A reader of patterns, and the characters that can stand beside each other inside one match of a pattern.

The pattern's tree becomes positions, one for each place that consumes a character, and the positions that can follow
each of them (Glushkov's construction). That is more than the pattern can match in the end, never less.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Reads the regular expressions of pre-tokenizers into a tree.
#
# They are in Oniguruma's syntax. Only what tokenizers use is read, and only where each construct has one meaning;
# anything else raises UnknownPattern, and then nothing is claimed about the tokenizer.

Test = Callable[[str], bool]
"""Whether a character is in a set. Exact for the characters that `cut_kinds.py` names."""


class UnknownPattern(ValueError):
    """A pattern with constructs that are not read here."""


@dataclass(frozen=True)
class Chars:
    """One character out of a set."""

    test: Test


@dataclass(frozen=True)
class Lookahead:
    """Looks at one character and consumes none. What it looks for makes no difference here."""


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    node: Node
    least: int
    most: int | None


Node = Chars | Lookahead | Sequence | Alternatives | Repeat

_CATEGORIES = {"L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "S", "Z"}
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t"}
_SETS: dict[str, Test] = {
    "s": str.isspace,
    "d": lambda char: unicodedata.category(char) == "Nd",
    "w": lambda char: char == "_" or char.isalnum(),
}


class PatternReader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self.named: set[str] = set()
        """The characters that the pattern names: literals, and both ends of ranges."""
        self.possessive = False
        """Whether a quantifier gives nothing back."""

    def read(self) -> Node:
        node = self._choice(fold=False)
        if self._at < len(self._source):
            raise self._unknown()
        return node

    def _choice(self, *, fold: bool) -> Node:
        options = [self._sequence(fold=fold)]
        while self._take("|"):
            options.append(self._sequence(fold=fold))
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def _sequence(self, *, fold: bool) -> Node:
        parts = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._quantified(self._atom(fold=fold)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _quantified(self, node: Node) -> Node:
        if self._take("?"):
            node = Repeat(node, 0, 1)
        elif self._take("*"):
            node = Repeat(node, 0, None)
        elif self._take("+"):
            node = Repeat(node, 1, None)
        elif self._take("{"):
            node = Repeat(node, *self._bounds())
        else:
            return node
        if self._next() in ("?", "*", "{"):
            raise self._unknown()
        if self._take(
            "+"
        ):  # behind braces it is a repetition, and elsewhere it gives nothing back: both are allowed for
            self.possessive = True
            node = Repeat(node, 1, None)
        return node

    def _bounds(self) -> tuple[int, int | None]:
        end = self._source.find("}", self._at)
        least, comma, most = self._source[self._at : max(end, self._at)].partition(",")
        if not least.isdecimal() or (most and not most.isdecimal()):
            raise self._unknown()
        self._at = end + 1
        return int(least), int(most) if most else None if comma else int(least)

    def _atom(self, *, fold: bool) -> Node:
        if self._take("("):
            return self._group(fold=fold)
        negated = self._source.startswith("[^", self._at)
        if self._take("["):
            test = self._char_class()
        elif self._next() in (".", "^", "$", "*", "+", "?", "{"):
            raise self._unknown()
        else:
            char_or_set = self._char_or_set()
            test = _equal(char_or_set) if isinstance(char_or_set, str) else char_or_set
        if fold and negated:
            raise self._unknown()
        return Chars(_folded(test) if fold else test)

    def _group(self, *, fold: bool) -> Node:
        lookahead = self._take("?!") or self._take("?=")
        if not lookahead:
            if self._take("?i:"):
                fold = True
            elif not self._take("?:") and self._next() in ("?", "*"):
                raise self._unknown()
        node = self._choice(fold=fold)
        if not self._take(")") or (lookahead and not isinstance(node, Chars)):
            raise self._unknown()
        return Lookahead() if lookahead else node

    def _char_class(self) -> Test:
        """What stands behind `[`, with nested classes and `&&`."""
        negated = self._take("^")
        sets: list[list[Test]] = [[]]
        if self._next() == "]":
            raise self._unknown()
        while not self._take("]"):
            if self._take("&&"):
                sets.append([])
            elif self._take("["):
                if self._next() == ":":
                    raise self._unknown()
                sets[-1].append(self._char_class())
            else:
                sets[-1].append(self._class_item())
        return lambda char: all(any(test(char) for test in tests) for tests in sets) != negated

    def _class_item(self) -> Test:
        low = self._char_or_set()
        if not isinstance(low, str):
            return low
        if self._next() != "-" or self._source.startswith("-]", self._at):
            return _equal(low)
        self._take("-")
        high = self._char_or_set()
        if not isinstance(high, str):
            raise self._unknown()
        return lambda char: low <= char <= high

    def _char_or_set(self) -> str | Test:
        char = self._any()
        if char == "\\":
            char = self._any()
            if char in ("p", "P"):
                return _property(self._name(), negated=char == "P")
            if char.lower() in _SETS:
                test = _SETS[char.lower()]
                return (lambda char: not test(char)) if char.isupper() else test
            if char.isalnum() and char not in _CONTROLS:
                raise self._unknown()
            char = _CONTROLS.get(char, char)
        self.named.add(char)
        return char

    def _name(self) -> str:
        end = self._source.find("}", self._at)
        if not self._take("{") or end < 0:
            raise self._unknown()
        name, self._at = self._source[self._at : end], end + 1
        return name

    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _any(self) -> str:
        char = self._next()
        if not char:
            raise self._unknown()
        self._at += 1
        return char

    def _take(self, text: str) -> bool:
        matches = self._source.startswith(text, self._at)
        self._at += len(text) if matches else 0
        return matches

    def _unknown(self) -> UnknownPattern:
        return UnknownPattern(f"at {self._at} of {self._source!r}")


def _equal(char: str) -> Test:
    return lambda other: other == char


def _folded(test: Test) -> Test:
    return lambda char: test(char) or test(char.lower()) or test(char.upper())


def _property(name: str, *, negated: bool) -> Test:
    if name == "Han":
        return lambda char: ("\u4e00" <= char <= "\u9fff") != negated
    if name not in _CATEGORIES:
        raise UnknownPattern(f"the property {name!r}")
    return lambda char: unicodedata.category(char).startswith(name) != negated


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
            case Alternatives(options):
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
