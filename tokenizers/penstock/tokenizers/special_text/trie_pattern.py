"""A regular expression for many words. Python's own alternation tries them one after the other at each place."""

from __future__ import annotations

import re
from collections.abc import Collection


def trie_pattern(words: Collection[str]) -> str:
    """Matches the longest of `words` that stands at a place. There must be at least one, and none empty."""
    rests: dict[str, set[str]] = {}
    for word in words:
        if word:
            rests.setdefault(word[0], set()).add(word[1:])
    options = [_option(first, rest) for first, rest in sorted(rests.items())]
    body = options[0] if len(options) == 1 else "|".join(options)
    if "" in words:
        return f"(?:{body})?"
    return body if len(options) == 1 else f"(?:{body})"


def lookahead_pattern(words: Collection[str]) -> str:
    """Matches the first character of each of `words`, so that words which overlap are all found."""
    rests: dict[str, set[str]] = {}
    for word in words:
        rests.setdefault(word[0], set()).add(word[1:])
    return "|".join(f"{re.escape(first)}(?={trie_pattern(rest)})" for first, rest in sorted(rests.items()))


def _option(start: str, rests: set[str]) -> str:
    """What all rests have in common goes into `start`, so that the pattern is nested no deeper than they branch."""
    while len(firsts := {rest[:1] for rest in rests}) == 1:
        [first] = firsts
        if not first:
            return re.escape(start)
        start += first
        rests = {rest[1:] for rest in rests}
    return re.escape(start) + trie_pattern(rests)
