"""Places where a text can be cut without changing its tokens."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass

import tokenizers

from .pattern import Alternatives, Chars, Pattern, Repeat
from .pipeline import Pipeline, read_pipeline

# The characters between which texts are cut, in kinds that patterns treat alike.
#
# Cuts are only looked for between characters that every normalization form keeps apart, and of which every version of
# Unicode says the same. Letters that fold to more than one character are left out (ß, İ, ŉ). Behind a cut there are
# no characters that an accent would change: with one, = becomes ≠ and a letter another letter.

_FEW = 600


@dataclass(frozen=True)
class CutKind:
    chars: str
    """As in a class of a regular expression: `a-zA-Z`."""

    def __contains__(self, char: str) -> bool:
        return any(low <= char <= high for low, high in self._ranges())

    def examples(self, named: Iterable[str]) -> list[str]:
        """All characters; of large ranges, in which all have the same properties, both ends and what is beside the
        characters that a pattern names."""
        chars = []
        beside = [chr(ord(char) + step) for char in named for step in (-1, 0, 1) if 0 < ord(char) < 0x10FFFF]
        for low, high in self._ranges():
            if ord(high) - ord(low) < _FEW:
                chars += [chr(code) for code in range(ord(low), ord(high) + 1)]
            else:
                chars += [low, high, *(char for char in beside if low <= char <= high)]
        return chars

    def _ranges(self) -> list[tuple[str, str]]:
        plain = self.chars.removeprefix("\\")
        if len(plain) == 1:
            return [(plain, plain)]
        return [(plain[i], plain[i + 2]) for i in range(0, len(plain), 3)]


SPACE = CutKind(" ")
DIGITS = CutKind("0-9")
ASCII_LETTERS = CutKind("a-zA-Z")
_LETTERS = (
    CutKind("À-ÖØ-Þà-öø-þĀ-įĲ-ňŊ-žẠ-ỹ"),  # Latin
    CutKind("Α-ΡΣ-Ωά-ία-ώ"),  # Greek
    CutKind("А-яё-ѓ"),  # Cyrillic
    CutKind("א-ת"),  # Hebrew
    CutKind("ؠ-ؿف-ي"),  # Arabic
    CutKind("ぁ-ゖァ-ヺ"),  # kana
    CutKind("가-힣"),  # Hangul
    CutKind("一-龥"),  # Chinese
)
_SIGNS = tuple(
    CutKind(char if char.isspace() else "\\" + char) for char in "\n\t" + string.punctuation if char not in "<=>"
)
_CHINESE_SIGNS = tuple(map(CutKind, "。，、！？；："))


def left_kinds(*, ascii_only: bool) -> tuple[CutKind, ...]:
    return (ASCII_LETTERS, DIGITS) if ascii_only else (ASCII_LETTERS, DIGITS, *_LETTERS)


def right_kinds(*, ascii_only: bool, space_only: bool) -> tuple[CutKind, ...]:
    """`space_only`: where a tokenizer would put a space before a text that starts with anything else."""
    if space_only:
        return (SPACE,)
    signs = (SPACE, DIGITS, *_SIGNS)
    return signs if ascii_only else signs + _CHINESE_SIGNS


_WINDOW = 65536
"""Characters searched in one call, which does not let other threads run."""
_GROUPS = 64
_DIGIT_RUN = re.compile("[0-9]+")


class Cuts:
    def __init__(self, pairs: Iterable[tuple[CutKind, CutKind]], digits: int | None, tokens: Iterable[str]) -> None:
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
    groups: dict[str, list[tuple[str, int]]] = {}
    for content in contents:
        for place, (one, two) in enumerate(itertools.pairwise(content), start=1):
            groups.setdefault(one + two, []).append((content, place))
    return groups


def _between(pairs: Iterable[tuple[CutKind, CutKind]]) -> re.Pattern[str] | None:
    """One alternative for all left sides that have the same right sides."""
    rights: dict[str, str] = {}
    for left, right in pairs:
        rights[left.chars] = rights.get(left.chars, "") + right.chars
    lefts: dict[str, str] = {}
    for left_chars, right_chars in rights.items():
        lefts[right_chars] = lefts.get(right_chars, "") + left_chars
    options = [f"(?<=[{left_chars}])(?=[{right_chars}])" for right_chars, left_chars in lefts.items()]
    return re.compile("|".join(options)) if options else None


# Proves where a text can be cut without changing its tokens.
#
# Let a cut be between the characters a and b. When no match of a pattern can go on from a to b, nor look at what
# stands behind a, then all matches before the cut are the same without the text behind it. Matches behind it are the
# same without the text before it, since no pattern looks back. So each pattern splits the two parts as it splits the
# whole, apart from the cut itself; and where one of them always matches a or b, the whole is split there, too. The
# model sees word by word. No added token may reach over the cut, nor stand beside it with flags that make it look
# there.


def read_cuts(backend: tokenizers.Tokenizer) -> Cuts | None:
    """None where nothing can be proven about any place."""
    pipeline = read_pipeline(backend)
    if pipeline is None:
        return None
    added = list(backend.get_added_tokens_decoder().values())
    raw, normalized = [], []
    for token in added:
        if backend.normalizer is None or not token.normalized:
            raw.append(token.content)
        else:  # looked for in the normalized text, where it can come from other characters than its own
            normalized += [token.content, backend.normalizer.normalize_str(token.content)]
    flagged = [token.content for token in added if token.lstrip or token.rstrip or token.single_word]
    pairs = [
        (left, right)
        for left, right in _proven_pairs(pipeline)
        if not any(_has(content, left, right) for content in normalized)
        and not any(content[-1:] in left or content[:1] in right for content in flagged)
    ]
    # A token that ends in a digit would let groups of digits start inside a run.
    digits_are_free = (
        not any(content[-1:] in DIGITS for content in raw + normalized)
        and not any(content[:1] in DIGITS for content in flagged)
        and not any(_has(content, DIGITS, DIGITS) for content in normalized)
    )
    digits = _digit_groups(pipeline) if digits_are_free else None
    return Cuts(pairs, digits, raw) if pairs or digits else None


def _has(content: str, left: CutKind, right: CutKind) -> bool:
    return any(one in left and two in right for one, two in itertools.pairwise(content))


def _proven_pairs(pipeline: Pipeline) -> list[tuple[CutKind, CutKind]]:
    ascii_only = not pipeline.composes
    rights = right_kinds(ascii_only=ascii_only, space_only=pipeline.adds_space)
    lefts = left_kinds(ascii_only=ascii_only)
    stages = [_Stage(pattern, {*lefts, *rights}) for pattern in pipeline.patterns]

    def cuts(left: CutKind, right: CutKind) -> bool:
        for stage in stages:
            if stage.joins(left, right):
                return False
            if stage.splits(left, right):
                return True
        return pipeline.splits_at_spaces and right == SPACE

    return [(left, right) for left in lefts for right in rights if cuts(left, right)]


class _Stage:
    """A pattern, asked once about each kind of characters."""

    def __init__(self, pattern: Pattern, kinds: Iterable[CutKind]) -> None:
        examples = {kind: kind.examples(pattern.named) for kind in kinds}
        self._pattern = pattern
        self._positions = {kind: pattern.positions(chars) for kind, chars in examples.items()}
        self._matched = {kind for kind, chars in examples.items() if pattern.always_matches(chars)}

    def joins(self, left: CutKind, right: CutKind) -> bool:
        return self._pattern.joins(self._positions[left], self._positions[right])

    def splits(self, left: CutKind, right: CutKind) -> bool:
        """Where it does not join them."""
        return left in self._matched or right in self._matched


def _digit_groups(pipeline: Pipeline) -> int | None:
    r"""k where the first pattern that can match digits does so with `\p{N}{1,k}` only."""
    if pipeline.adds_space:
        return None
    digits = DIGITS.examples(())
    pattern = next((pattern for pattern in pipeline.patterns if pattern.positions(digits)), None)
    if pattern is None:
        return None
    for option in pattern.tree.options if isinstance(pattern.tree, Alternatives) else (pattern.tree,):
        match option:
            case Repeat(Chars(test), 1, int(most)) if all(map(test, digits)):
                return most if len(pattern.positions(digits)) == most else None
    return None
