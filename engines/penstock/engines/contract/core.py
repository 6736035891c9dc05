"""The core of an engine process: requests in, one message out for each step."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # who starts engine processes imports little
    from penstock.engines.contract.engine_stats import EngineStats
    from penstock.engines.contract.messages import DownMessage, StepOutputs
    from penstock.engines.contract.model_info import ModelInfo

NUM_STEPS = 256
"""That are kept: the newest."""
_ROW = struct.Struct("=Qdd5q")
_SECONDS = struct.Struct("=d")
_SECONDS_AT = 16
"""Where in a row its seconds are."""
STEPS_BYTES = NUM_STEPS * _ROW.size
"""What a ring takes."""
_FAILED = -1.0


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


class StepRow(NamedTuple):
    """One step as it was scheduled."""

    number: int
    """From 1."""
    scheduled_at: float
    """Seconds of the monotonic clock, which all processes of a machine share."""
    seconds: float
    """Until its result came; 0: it was under way; -1: it raised."""
    num_requests: int
    """In the step."""
    num_tokens: int
    """Of all of them, in the step."""
    num_running: int
    num_waiting: int
    num_free_blocks: int


class StepRing:
    """What a core writes down of its steps, at about a microsecond for each (`host.black_box`)."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        """`memory` has room for `STEPS_BYTES`, which are overwritten; None: nobody looks at it."""
        self._memory = bytearray(STEPS_BYTES) if memory is None else memory
        self._begun = 0
        self._ended = 0

    def begins(self, now: float, requests: int, tokens: int, running: int, waiting: int, free_blocks: int) -> None:
        """A step is handed to the model."""
        self._begun = number = self._begun + 1
        offset = number % NUM_STEPS * _ROW.size
        _ROW.pack_into(self._memory, offset, number, now, 0.0, requests, tokens, running, waiting, free_blocks)

    def ends(self, seconds: float) -> None:
        """The oldest step under way has its result."""
        self._ended = number = self._ended + 1
        _SECONDS.pack_into(self._memory, number % NUM_STEPS * _ROW.size + _SECONDS_AT, seconds)

    def fails(self) -> None:
        """A step has raised: no step is under way any more."""
        while self._ended < self._begun:
            self.ends(_FAILED)


def read_steps(memory: bytes) -> list[StepRow]:
    """What is in a ring, in order."""
    rows = (StepRow(*fields) for fields in _ROW.iter_unpack(memory[:STEPS_BYTES]))
    return sorted(row for row in rows if row.number)
