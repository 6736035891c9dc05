"""Reads text with a part of a parser, however the text is cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

from penstock.tokenizers.parsing import Reader, Reading

T = TypeVar("T")
Write = Callable[[str], object]


def read(reading: Callable[[Reader], Reading[T]], pieces: list[str]) -> tuple[T, str]:
    """The result, and what was not read."""
    reader = Reader()
    running = reading(reader)
    waiting = [*pieces, None]
    try:
        while True:
            next(running)
            piece = waiting.pop(0)
            if piece is None:
                reader.end()
            else:
                reader.feed(piece)
    except StopIteration as stop:
        return stop.value, reader.rest() + "".join(piece for piece in waiting if piece)


def written(reading: Callable[[Reader, Write], Reading[bool]], text: str) -> tuple[str | None, str]:
    """What was written, None if it was not complete, and what was not read. Each character arrives alone."""
    pieces: list[str] = []
    complete, rest = read(lambda reader: reading(reader, pieces.append), list(text))
    return ("".join(pieces) if complete else None), rest


def split(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    return [text[start:end] for start, end in pairwise(ends)]
