"""Finds the text of tokens in a client's strings, and marks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from .trie_pattern import lookahead_pattern

_WORD = re.compile(r"\w+")
_END = "\0"


class Finder:
    def __init__(self, contents: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize`: what a tokenizer does to a text before it looks for these tokens, where that can make one of
        other text."""
        self._whole = re.compile(lookahead_pattern(contents))
        self._longest = max(map(len, contents))
        self._first = re.compile(f"[{re.escape(''.join({text[0] for text in contents}))}]")
        self._last = re.compile(f"[{re.escape(''.join({text[-1] for text in contents}))}]")
        self._all = _END + _END.join(contents) + _END
        self._normalize = normalize
        self._whole_normal = self._whole
        if normalize is not None:
            normal = {normalize(text).strip(" ▁") for text in contents}
            self._whole_normal = re.compile(lookahead_pattern(normal - {""}))

    def finds(self, text: str) -> bool:
        """Whether `text` has a token's text, or may be a part of one together with what stands around it."""
        if self._whole.search(text) is not None or self._is_part(text):
            return True
        return self._normalize is not None and self._whole_normal.search(self._normalize(text)) is not None

    def marked(self, text: str, mark: str) -> str:
        """`text` with a `mark` inside each token's text. White space around it stays outside of marks: templates trim
        what they are given."""
        text = self._whole.sub(lambda match: match[0] + mark, text)
        if not self._is_part(text.replace(mark, "")):
            return text
        bare = text.strip()
        at = text.index(bare)
        return f"{text[:at]}{mark}{bare}{mark}{text[at + len(bare) :]}"

    def _is_part(self, text: str) -> bool:
        head, tail = text.lstrip()[: self._longest], text.rstrip()[-self._longest :]
        return (
            any(_END + tail[at.start() :] in self._all for at in self._first.finditer(tail))
            or any(head[: at.end()] + _END in self._all for at in self._last.finditer(head))
            or (len(head) < self._longest and self._is_middle(head.rstrip()))
        )

    def _is_middle(self, text: str) -> bool:
        """Plain words do not count: templates compare them (`string`, `function`), and look values up by them."""
        return bool(text) and text in self._all and _WORD.fullmatch(text) is None
