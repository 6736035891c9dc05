"""The ring of a core's newest steps, in memory that another process may read (`host.black_box`)."""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

NUM_STEPS = 256
"""That are kept: the newest."""
_ROW = struct.Struct("=Qdd6q")
_SECONDS = struct.Struct("=d")
_COUNT = struct.Struct("=q")
_SECONDS_AT = 16
"""Where in a row its seconds are."""
_PROMPT_AT = _ROW.size - _COUNT.size
"""Where in a row its prompt tokens are."""
STEPS_BYTES = NUM_STEPS * _ROW.size
"""What a ring takes."""
_FAILED = -1.0


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
    num_prompt_tokens: int = 0
    """Of prompts, among its tokens; known at its end."""


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
        _ROW.pack_into(self._memory, offset, number, now, 0.0, requests, tokens, running, waiting, free_blocks, 0)

    def ends(self, seconds: float) -> None:
        """The oldest step under way has its result."""
        self._ended = number = self._ended + 1
        _SECONDS.pack_into(self._memory, number % NUM_STEPS * _ROW.size + _SECONDS_AT, seconds)

    def had_prompts(self, tokens: int) -> None:
        """So many tokens of the step that ended last were of prompts."""
        _COUNT.pack_into(self._memory, self._ended % NUM_STEPS * _ROW.size + _PROMPT_AT, tokens)

    def fails(self) -> None:
        """A step has raised: no step is under way any more."""
        while self._ended < self._begun:
            self.ends(_FAILED)

    def rows(self, since: int = 0) -> list[StepRow]:
        """Those that are kept, in order; `since`: without this number and those before it, unless these
        are of another ring."""
        if since > self._begun:
            since = 0
        rows = read_steps(bytes(self._memory[:STEPS_BYTES]))
        return [row for row in rows if row.number > since]


def read_steps(memory: bytes) -> list[StepRow]:
    """What is in a ring, in order."""
    rows = (StepRow(*fields) for fields in _ROW.iter_unpack(memory[:STEPS_BYTES]))
    return sorted(row for row in rows if row.number)
