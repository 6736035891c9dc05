"""The progress of loading a model, and the callbacks that report it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class Loading(msgspec.Struct, array_like=True, frozen=True, tag="loading"):
    """`str` of it is for operators: `weights: 120 of 290 tensors`."""

    stage: str
    """In a word or two: download, weights, compile, warm-up ..."""
    done: int = 0
    total: int = 0
    """0: not known."""
    unit: str = ""
    """tensors, files; B for bytes, which are shown in MB."""

    @property
    def share(self) -> float | None:
        """Of 1; None: not known."""
        return min(1.0, self.done / self.total) if self.total else None

    def __str__(self) -> str:
        if not self.total:
            return self.stage
        if self.unit == "B":
            return f"{self.stage}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        return f"{self.stage}: {self.done:,} of {self.total:,} {self.unit}"


Report = Callable[[Loading], None]
"""Called whenever there is news; who passes it on sees to it that this is not too often."""


def silent(loading: Loading | None) -> None:
    """A Report that goes nowhere."""


class LoadingEnds(Protocol):
    """A Report that is told of the end, too."""

    def __call__(self, loading: Loading | None) -> None:
        """None: it has ended, well or not."""
        ...
