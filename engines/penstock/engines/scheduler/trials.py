"""Which request made a step fail? Those of the step run apart from all others until the guilty one is alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.engines.scheduler.running import Run


class Trials:
    """Groups of suspects. Each gets a step of its own; a group whose step fails is divided in two."""

    def __init__(self) -> None:
        self._groups: deque[list[Run]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def suspects(self) -> Sequence[Run]:
        """The group whose turn it is. Some may have ended meanwhile."""
        return self._groups[0]

    def acquit(self) -> None:
        """The group's step succeeded, or none of it has anything to compute."""
        self._groups.popleft()

    def convict(self) -> None:
        """A step of one request alone has failed, on trial or not: it was that one's fault."""
        if self._groups:
            self._groups.popleft()

    def divide(self, suspects: Sequence[Run]) -> None:
        """A step of these has failed: the one on trial, if there was one."""
        if self._groups:
            self._groups.popleft()
        half = (len(suspects) + 1) // 2
        for group in (suspects[half:], suspects[:half]):
            if group:
                self._groups.appendleft(list(group))
