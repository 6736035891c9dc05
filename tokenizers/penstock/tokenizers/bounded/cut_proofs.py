"""Proves where a text can be cut without changing its tokens.

Let a cut be between the characters a and b. When no match of a pattern can go on from a to b, nor look at what stands
behind a, then all matches before the cut are the same without the text behind it. Matches behind it are the same
without the text before it, since no pattern looks back. So each pattern splits the two parts as it splits the whole,
apart from the cut itself; and where one of them always matches a or b, the whole is split there, too. The model sees
word by word. No added token may reach over the cut, nor stand beside it with flags that make it look there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import tokenizers

from .cut_kinds import DIGITS, SPACE, Kind, left_kinds, right_kinds
from .cuts import Cuts
from .pattern import Pattern
from .pattern_syntax import Chars, Choice, Repeat
from .pipeline import Pipeline, read_pipeline


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


def _has(content: str, left: Kind, right: Kind) -> bool:
    return any(one in left and two in right for one, two in itertools.pairwise(content))


def _proven_pairs(pipeline: Pipeline) -> list[tuple[Kind, Kind]]:
    ascii_only = not pipeline.composes
    rights = right_kinds(ascii_only=ascii_only, space_only=pipeline.adds_space)
    lefts = left_kinds(ascii_only=ascii_only)
    stages = [_Stage(pattern, {*lefts, *rights}) for pattern in pipeline.patterns]

    def cuts(left: Kind, right: Kind) -> bool:
        for stage in stages:
            if stage.joins(left, right):
                return False
            if stage.splits(left, right):
                return True
        return pipeline.splits_at_spaces and right == SPACE

    return [(left, right) for left in lefts for right in rights if cuts(left, right)]


class _Stage:
    """A pattern, asked once about each kind of characters."""

    def __init__(self, pattern: Pattern, kinds: Iterable[Kind]) -> None:
        examples = {kind: kind.examples(pattern.named) for kind in kinds}
        self._pattern = pattern
        self._positions = {kind: pattern.positions(chars) for kind, chars in examples.items()}
        self._matched = {kind for kind, chars in examples.items() if pattern.always_matches(chars)}

    def joins(self, left: Kind, right: Kind) -> bool:
        return self._pattern.joins(self._positions[left], self._positions[right])

    def splits(self, left: Kind, right: Kind) -> bool:
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
    for option in pattern.tree.options if isinstance(pattern.tree, Choice) else (pattern.tree,):
        match option:
            case Repeat(Chars(test), 1, int(most)) if all(map(test, digits)):
                return most if len(pattern.positions(digits)) == most else None
    return None
