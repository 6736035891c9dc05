"""Trials after a step that failed: its requests run apart from all others until the guilty one is alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from penstock.engines.scheduler.request import Run


class Trials(deque[list[Run]]):
    """Groups of suspects. Each gets steps of its own until it has computed what failed: mostly one, but more where
    recurrent states went back to a checkpoint. A group whose step fails is divided in two."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[Run, int] = {}
        """Up to where the step that failed would have computed each."""

    @property
    def suspects(self) -> Sequence[Run]:
        """The group whose turn it is. Some may have ended meanwhile."""
        return self[0]

    def succeeded(self) -> None:
        """A step of the group has succeeded."""
        self[0] = [run for run in self[0] if run.has_seat and run.num_computed_tokens < self._ends[run]]
        if not self[0]:
            self.acquit()

    def acquit(self) -> None:
        """The group has computed what failed, or has nothing to compute."""
        self.popleft()

    def convict(self) -> None:
        """A step of one request alone has failed, on trial or not: it was that one's fault."""
        if self:
            self.popleft()

    def divide(self, ends: Mapping[Run, int]) -> None:
        """A step that would have computed these runs up to there has failed: the one on trial, if there was one."""
        if self:
            self.popleft()
        else:
            self._ends.clear()
        self._ends |= ends
        suspects = list(ends)
        half = (len(suspects) + 1) // 2
        for group in (suspects[half:], suspects[:half]):
            if group:
                self.appendleft(group)
