"""Trials after a step that failed: its requests run apart from all others until the guilty one is alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.engines.scheduler.request import Run


class Trials(deque[list[Run]]):
    """Groups of suspects. Each gets a step of its own; a group whose step fails is divided in two."""

    @property
    def suspects(self) -> Sequence[Run]:
        """The group whose turn it is. Some may have ended meanwhile."""
        return self[0]

    def acquit(self) -> None:
        """The group's step succeeded, or none of it has anything to compute."""
        self.popleft()

    def convict(self) -> None:
        """A step of one request alone has failed, on trial or not: it was that one's fault."""
        if self:
            self.popleft()

    def divide(self, suspects: Sequence[Run]) -> None:
        """A step of these has failed: the one on trial, if there was one."""
        if self:
            self.popleft()
        half = (len(suspects) + 1) // 2
        for group in (suspects[half:], suspects[:half]):
            if group:
                self.appendleft(list(group))
