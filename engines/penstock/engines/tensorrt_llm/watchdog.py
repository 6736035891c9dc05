"""Aborted requests until they are really gone.

TensorRT-LLM's abort sends a note and answers nothing; now and then a request goes on, or ends without a word. So an
aborted request keeps its seat until its last output has come, or until the engine's own statistics say that it works on
fewer requests than it was given. Whether the engine hangs is not judged here (`process.liveness`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.engines.errors import EngineDeadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """Seconds."""

    abort: float = 5.0
    """After which an abort is overdue, and is tried again."""
    settle: float = 2.0
    """How old statistics may be when they come, and for how long they must say the same to be believed."""
    lost: float = 60.0
    """After which the seat of an overdue abort is lost."""


@dataclass
class ProbeVerdict:
    """What is to be done now."""

    retry: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    probe: bool = False
    """Nothing moves and only overdue aborts are left: a small request would show whether the engine is alive."""


@dataclass
class WatchdogCounters:
    retried: int = 0
    """Aborts that were tried again."""
    released: int = 0
    """Seats that came free without a last output."""


class Watchdog:
    """Plain book-keeping, told of everything by its owner; knows the time only from `clock`."""

    def __init__(self, num_seats: int, patience: Patience, clock: Callable[[], float]) -> None:
        self.counters = WatchdogCounters()
        self._num_seats = num_seats
        self._patience = patience
        self._clock = clock
        self._started: dict[int, float] = {}
        """What the engine holds, in the order in which it got it."""
        self._aborted: dict[int, float] = {}
        self._tried: dict[int, float] = {}
        """Of aborted ones: when the abort was last tried."""
        self._heard = self._sampled = clock()
        self._short_since: float | None = None
        """Since when all statistics have said that it works on fewer than it holds, and the fewest of these misses."""
        self._short_by = 0
        self._probe: float | None = None

    @property
    def is_busy(self) -> bool:
        """It holds requests, or a probe."""
        return bool(self._started) or self._probe is not None

    def started(self, request_id: int) -> None:
        if not self.is_busy:
            self._heard = self._sampled = self._clock()
        self._started[request_id] = self._clock()

    def aborted(self, request_id: int) -> None:
        self._aborted[request_id] = self._tried[request_id] = self._clock()

    def ended(self, request_id: int) -> None:
        """Its last output has come."""
        self._heard = self._clock()
        self._forget(request_id)

    def heard(self) -> None:
        """Something of a request has come."""
        self._heard = self._clock()

    def sample(self, num_active: int) -> None:
        """Statistics have come. Of an engine that is full they say nothing: others may wait in it unseen."""
        now = self._heard = self._sampled = self._clock()
        old = sum(started <= now - self._patience.settle for started in self._started.values())
        short_by = old - num_active if num_active < self._num_seats else 0
        if short_by <= 0:
            self._short_since = None
        elif self._short_since is None:
            self._short_since, self._short_by = now, short_by
        else:
            self._short_by = min(self._short_by, short_by)

    def probe_started(self) -> None:
        self._probe = self._clock()

    def probe_ended(self) -> list[int]:
        """The engine lives, and had told nothing of an iteration before it was probed: it works on none of those that
        were overdue then."""
        probe, self._probe = self._probe, None
        self._heard = self._clock()
        limit = (probe if probe is not None else self._heard) - self._patience.abort
        return self._release([i for i, since in self._aborted.items() if since <= limit])

    def check(self) -> ProbeVerdict:
        """Raises EngineDeadError when only a new engine process can help."""
        now = self._clock()
        self._check_seats(now)
        overdue = [i for i, since in self._aborted.items() if now - since >= self._patience.abort]
        verdict = ProbeVerdict()
        if overdue and self._short_since is not None and now - self._short_since >= self._patience.settle:
            verdict.released = self._release(overdue[: self._short_by])
            self._short_since = None
        verdict.retry = [i for i in overdue if i in self._tried and now - self._tried[i] >= self._patience.abort]
        for request_id in verdict.retry:
            self._tried[request_id] = now
            self.counters.retried += 1
            logger.warning(
                "an aborted request still runs after %.0f s: aborting again", now - self._aborted[request_id]
            )
        quiet = now - max(self._sampled, self._heard) >= self._patience.abort
        verdict.probe = bool(self._aborted) and len(overdue) == len(self._started) and quiet and self._probe is None
        return verdict

    def _check_seats(self, now: float) -> None:
        lost = sum(now - since >= self._patience.lost for since in self._aborted.values())
        if lost > self._num_seats // 4:
            seats = f"{lost} of {self._num_seats} seats"
            raise EngineDeadError(f"TensorRT-LLM keeps {seats} for requests that were aborted")

    def _release(self, ids: list[int]) -> list[int]:
        for request_id in ids:
            self._forget(request_id)
            self.counters.released += 1
            logger.warning("TensorRT-LLM dropped an aborted request without reporting it")
        return ids

    def _forget(self, request_id: int) -> None:
        self._started.pop(request_id, None)
        self._aborted.pop(request_id, None)
        self._tried.pop(request_id, None)
