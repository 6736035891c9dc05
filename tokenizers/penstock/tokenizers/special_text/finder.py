"""Finds the text of tokens in a client's strings, and marks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from .trie_pattern import lookahead_pattern

_WORD = re.compile(r"\w+")
_END = "\0"


class Finder:
    def __init__(self, contents: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize`: what a tokenizer does to a text before it looks for these tokens, where that can make one of
        other text."""
        self._whole = re.compile(lookahead_pattern(contents))
        self._longest = max(map(len, contents))
        firsts, lasts = {text[0] for text in contents}, {text[-1] for text in contents}
        self._first, self._last = _any_of(firsts), _any_of(lasts)
        chars = set().union(*contents)
        self._chars = re.compile(f"{_any_of(chars).pattern}+")
        self._sign = _any_of({char for char in chars if _WORD.match(char) is None} | firsts | lasts)
        """What every text has that holds a token, or may be a part of one."""
        self._all = _END + _END.join(contents) + _END
        self._normalize = normalize
        self._whole_normal = self._whole
        if normalize is not None:
            normal = {normalize(text).strip(" ▁") for text in contents}
            self._whole_normal = re.compile(lookahead_pattern(normal - {""}))

    def finds(self, texts: list[str]) -> bool:
        """Whether one of `texts` has a token's text, or may be a part of one together with what stands around it."""
        if self._normalize is not None and any(map(self._finds_normal, texts)):
            return True
        if self._sign.search(_END.join(texts)) is None:
            return False
        return any(self._whole.search(text) is not None or self._is_part(text) for text in texts)

    def marked(self, text: str, mark: str) -> str:
        """`text` with a `mark` inside each token's text. White space around it stays outside of marks: templates trim
        what they are given."""
        found = self._whole.sub(lambda match: match[0] + mark, text)
        if not self._is_part(text):
            return found
        bare = found.strip()
        at = found.index(bare)
        return f"{found[:at]}{mark}{bare}{mark}{found[at + len(bare) :]}"

    def _finds_normal(self, text: str) -> bool:
        assert self._normalize is not None
        return self._whole_normal.search(self._normalize(text)) is not None

    def _is_part(self, text: str) -> bool:
        if self._sign.search(text) is None:
            return False
        head, tail = text.lstrip()[: self._longest], text.rstrip()[-self._longest :]
        return (
            any(_END + tail[at.start() :] in self._all for at in self._first.finditer(tail))
            or any(head[: at.end()] + _END in self._all for at in self._last.finditer(head))
            or (len(head) < self._longest and self._is_middle(head.rstrip()))
        )

    def _is_middle(self, text: str) -> bool:
        """Plain words do not count: templates compare them (`string`, `function`), and look values up by them."""
        return self._chars.fullmatch(text) is not None and _WORD.fullmatch(text) is None and text in self._all


def _any_of(chars: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"[{''.join(map(re.escape, sorted(chars)))}]")
