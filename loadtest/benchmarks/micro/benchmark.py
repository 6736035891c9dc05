"""The definition of a micro benchmark: its name, its setup, and the work that is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """A benchmark that has been set up."""

    run: Callable[[], object]
    """What is timed. Every call costs the same."""
    operations: int = 1
    """That one call does; every figure is of one of them."""
    renew: Callable[[], object] | None = None
    """For what a call uses up: called, untimed, before each one."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    """`group/what`."""
    operation: str
    """What the figures are of, in the singular."""
    setup: Callable[[], Work]
    """Imports what is heavy, and draws what is random from a seed. A missing package (ModuleNotFoundError) skips the
    benchmark."""

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]
