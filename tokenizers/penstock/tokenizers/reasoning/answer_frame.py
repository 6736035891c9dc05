"""Where an answer begins: for grammars that hold for the answer alone, and for bounds on the thought before it."""

from __future__ import annotations

from typing import NamedTuple


class ThoughtTags(NamedTuple):
    """What tells a model's thoughts from its answer. The tags are texts; each may be a special token."""

    openings: tuple[str, ...]
    """Any of these begins a thought."""
    endings: tuple[str, ...]
    """Any of these ends it."""
    closing: str
    """What a model that has thought enough writes."""
    inside: bool = False
    """The output begins inside of a thought."""
    again: bool = False
    """A thought may begin anywhere, also behind another one; else at the beginning of the output only."""


class AnswerFrame(NamedTuple):
    """What stands before an answer in a model's output."""

    thought: tuple[str, str] | None = None
    """What begins and ends a thought, which may be left out. Nothing begins it: the output begins inside of it."""
    preface: str = ""
    """What stands right before the answer."""
    tags: ThoughtTags | None = None
    """None: those of `thought`, and nothing else."""

    @property
    def thought_tags(self) -> ThoughtTags | None:
        """None: there is no thought."""
        if self.tags is not None or self.thought is None:
            return self.tags
        begin, end = self.thought
        return ThoughtTags((begin,) if begin else (), (end,), end, inside=not begin)
