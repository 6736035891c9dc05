"""Tags in text of which the end has not arrived yet."""

from __future__ import annotations

import re
from functools import cached_property


class Tags:
    """Some strings to look for.

    No tag may be part of another one. So the first tag that begins is also the first that is complete, and which tag is
    found does not depend on how the text is cut. (Stop strings have no such rule, which is why `StopStrings` needs an
    automaton.) Looking costs the same for each character, however long the text is.
    """

    def __init__(self, *tags: str) -> None:
        for tag in tags:
            if not tag or any(tag in other for other in tags if other is not tag):
                raise ValueError(f"the tag {tag!r} is empty or part of another one")
        self.tags = tags
        self._longest = max(map(len, tags))

    # compiled when they are needed: there are tags for every format of tool calls, and a model has one
    @cached_property
    def _complete(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tags)))

    @cached_property
    def _begun(self) -> re.Pattern[str]:
        beginnings = "|".join(_beginnings(tag) for tag in self.tags if len(tag) > 1)
        return re.compile(rf"(?:{beginnings})\Z" if beginnings else "(?!)")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first tag from `start` on."""
        return self._complete.search(text, start)

    def begun(self, text: str, start: int) -> int:
        """Where a tag begins that more text may complete; the end of the text if there is none."""
        found = self._begun.search(text, max(start, len(text) - self._longest + 1))
        return len(text) if found is None else found.start()

    def at(self, text: str, start: int) -> str | None:
        """The tag that stands at `start`."""
        found = self._complete.match(text, start)
        return None if found is None else found[0]

    def may_be_at(self, text: str, start: int) -> bool:
        """Whether all the text from `start` on is the beginning of a tag. True if there is none yet."""
        if len(text) - start >= self._longest:
            return False
        rest = text[start:]
        return any(tag.startswith(rest) for tag in self.tags)


def _beginnings(tag: str) -> str:
    """A pattern for all beginnings of a tag but the whole: `a(?:b)?` for "abc"."""
    pattern = ""
    for char in reversed(tag[:-1]):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern
