"""The core of an engine process: requests in, one message out for each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import DownMessage, StepOutputs
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step_ring import StepRing


class Core(Protocol):
    """What an engine process runs: requests in, one message out for each step."""

    ring: StepRing
    """Where it writes down its steps, for the case that the process dies."""

    @property
    def broken(self) -> bool:
        """It cannot continue; live requests need a new process."""
        ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_work(self) -> bool:
        """`step` would do something now."""
        ...

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that become readable when there is work without a message: an adapter is ready to be
        installed, or an engine that runs by itself has tokens (`ContinuousBatcher.wakeup`)."""
        ...

    @property
    def next_look(self) -> float | None:
        """When `step` has to be called even if there is no work until then: the deadline of a request, or of an adapter
        that is being read."""
        ...

    def step(self, messages: Iterable[DownMessage]) -> StepOutputs:
        """Takes in messages, advances, and returns the outputs and replies of that."""
        ...

    @property
    def expected_seconds(self) -> float | None:
        """What the work under way is expected to take; None: not known. Read by another thread, too."""
        ...

    @property
    def quiet_since(self) -> float | None:
        """Since when work that goes on outside `step` has given no result; None: there is no such work. Read by another
        thread, too."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
