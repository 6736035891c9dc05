"""What moves contents of blocks between a runner's KV cache and elsewhere."""

from __future__ import annotations

from typing import Protocol

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.scheduler.pending import SideWork


class BlockMover(SideWork, Protocol):
    """Driven by the engine's loop: `advance` between steps, `begin` when one is scheduled, `carry_out` before it is
    submitted, `collected` when its result is there."""

    def begin(self) -> None:
        """Has the blocks read that requests wait for."""
        ...

    def carry_out(self, step: SchedulerOutput) -> None:
        """Copies the blocks out that the step may overwrite, and those in that it reads."""
        ...

    def collected(self) -> None:
        """A step has succeeded, and its outputs have not left yet."""
        ...

    def clear(self) -> None:
        """After the prefix cache was emptied: what is elsewhere is deleted, too."""
        ...

    def report(self, stats: EngineStats) -> None:
        """Puts its figures there."""
        ...

    def close(self, *, save: bool) -> None:
        """`save`: what the cache holds is of use to a later process."""
        ...
