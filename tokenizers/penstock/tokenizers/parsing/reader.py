"""Reading text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cached_property
from typing import TypeAlias, TypeVar


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
        match = self._begun.search(text, max(start, len(text) - self._longest + 1))
        return len(text) if match is None else match.start()

    def at(self, text: str, start: int) -> str | None:
        """The tag that stands at `start`."""
        match = self._complete.match(text, start)
        return None if match is None else match[0]

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


T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""What reads: `yield from` it to get what it has read. It yields whenever it needs more text."""

_ANY = re.compile(r".*", re.DOTALL)
SPACE = re.compile(r"[ \t\r\n]*")


class Reader:
    """Text behind a mark that only moves forward.

    A parser asks for what it expects and is resumed where it was when more text is there, so it can be written as if
    it had all of the text. What is read is never looked at again, and what is not read yet is never longer than a tag.
    """

    def __init__(self) -> None:
        self._text = ""
        self._mark = 0
        self._ended = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._mark :] + text
        self._mark = 0

    def end(self) -> None:
        """No more text comes. What waits for more is told that there is none."""
        self._ended = True

    def record(self, first: str = "") -> None:
        """Keeps what is read from now on, behind `first`, so that it can be given back if it turns out to be text."""
        self._record = [first]

    def forget(self) -> None:
        """Keeps nothing any more."""
        self._record = None

    def recorded(self) -> str:
        """What was kept. It is kept no longer."""
        kept, self._record = self._record, None
        return "".join(kept or ())

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters, which stay unread. Fewer at the end."""
        while len(self._text) - self._mark < count and not self._ended:
            yield
        return self._text[self._mark : self._mark + count]

    def rest(self) -> str:
        """What has arrived and is not read."""
        return self._text[self._mark :]

    def at_end(self) -> Reading[bool]:
        return not (yield from self.peek())

    def take(self, count: int = 1) -> str:
        """Reads characters that `peek` has shown."""
        return self._read(self._mark + count)

    def one_of(self, tags: Tags) -> Reading[str | None]:
        """Reads a tag. None if the text does not go on with one; then nothing is read."""
        while True:
            tag = tags.at(self._text, self._mark)
            if tag is not None:
                return self.take(len(tag))
            if self._ended or not tags.may_be_at(self._text, self._mark):
                return None
            yield

    def ends_within(self, tags: Tags) -> bool:
        """Whether no more text comes, and what is left of it is the beginning of one of these tags."""
        return self._ended and self._mark < len(self._text) and tags.may_be_at(self._text, self._mark)

    def run(self, kind: re.Pattern[str], pass_on: Callable[[str], object], most: int | None = None) -> Reading[None]:
        """Reads the characters that `kind` matches (a pattern such as `[a-z]*`), and passes them on as they come."""
        room = most
        while True:
            stop = len(self._text) if room is None else self._mark + room
            match = kind.match(self._text, self._mark, stop)
            text = self._read(self._mark if match is None else match.end())
            if text:
                pass_on(text)
            room = None if room is None else room - len(text)
            if room == 0 or self._ended or self._mark < len(self._text):
                return
            yield

    def everything(self, pass_on: Callable[[str], object]) -> Reading[None]:
        yield from self.run(_ANY, pass_on)

    def word(self, kind: re.Pattern[str], most: int) -> Reading[str]:
        """Characters that `kind` matches, together, and no more than `most`."""
        pieces: list[str] = []
        yield from self.run(kind, pieces.append, most)
        return "".join(pieces)

    def skip_space(self) -> Reading[None]:
        yield from self.run(SPACE, _drop)

    def before(self, tags: Tags, pass_on: Callable[[str], object]) -> Reading[bool]:
        """Passes on the text before the first tag, which stays unread. False if there is none up to the end."""
        while True:
            match = tags.find(self._text, self._mark)
            if match is not None:
                stop = match.start()
            else:
                stop = len(self._text) if self._ended else tags.begun(self._text, self._mark)
            text = self._read(stop)
            if text:
                pass_on(text)
            if match is not None or self._ended:
                return match is not None
            yield

    def until(self, tags: Tags, pass_on: Callable[[str], object]) -> Reading[str | None]:
        """The same, and reads the tag as well."""
        yield from self.before(tags, pass_on)
        return (yield from self.one_of(tags))

    def _read(self, stop: int) -> str:
        text = self._text[self._mark : stop]
        self._mark = stop
        if self._record is not None and text:
            self._record.append(text)
        return text


def _drop(text: str) -> None:
    pass
