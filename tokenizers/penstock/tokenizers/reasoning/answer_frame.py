"""Where a model's answer begins, for grammars that hold for the answer alone."""

from __future__ import annotations

from typing import NamedTuple


class AnswerFrame(NamedTuple):
    """What stands before an answer in a model's output."""

    thought: tuple[str, str] | None = None
    """What begins and ends a thought, which may be left out. Nothing begins it: the output begins inside of it."""
    preface: str = ""
    """What stands right before the answer."""
