"""What becomes of each request of an ensemble: counted once, as Triton counts it."""

from __future__ import annotations

import asyncio
from time import monotonic_ns

from penstock.classic.ensemble.in_flight import InFlight
from penstock.classic.messages import Timings
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import CancelledError


class Entry:
    """A request, from its admission to its end. One that succeeds is one execution with the times of its steps."""

    def __init__(
        self,
        statistics: ModelStatistics,
        in_flight: InFlight,
        inferences: int,
        timings: Timings,
        outer: Timings | None,
    ) -> None:
        """`timings`: what its steps have taken; `outer`: those of the ensemble that it is a step of."""
        self._statistics = statistics
        self._in_flight = in_flight
        self._timings = timings
        self._outer = outer
        self._inferences = inferences
        self._started = monotonic_ns()
        self._running: asyncio.Event | None = in_flight.begin()
        self._has_responded = False

    def responded(self) -> None:
        """There is a response of a stream, or an error in its place."""
        if not self._has_responded:
            self._has_responded = True
            if self._statistics.observer is not None:
                self._statistics.observer.first_response(monotonic_ns() - self._started)

    def succeeded(self) -> None:
        if self._ended():
            return
        spent, count = self._timings, self._inferences
        if self._outer is not None:
            self._outer.add(spent.compute_input, spent.compute_infer, spent.compute_output)
        times = {
            "compute_input": spent.compute_input,
            "compute_infer": spent.compute_infer,
            "compute_output": spent.compute_output,
        }
        self._statistics.executed(count, **times)
        total = monotonic_ns() - self._started
        self._statistics.succeeded(requests=1, inferences=count, total=total, queue=0, **times)
        if self._statistics.observer is not None:
            self._statistics.observer.request(total=total, queue=0, **times)

    def failed(self, error: BaseException) -> None:
        if not self._ended():
            cancelled = isinstance(error, CancelledError | asyncio.CancelledError)
            reason = "CANCELED" if cancelled else "OTHER"
            self._statistics.failed(monotonic_ns() - self._started, reason)

    def _ended(self) -> bool:
        """Whether it had ended before."""
        running, self._running = self._running, None
        if running is None:
            return True
        self._in_flight.end(running)
        return False
