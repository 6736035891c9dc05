"""What the reference server has really done: the truth that clients' figures are compared with."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec

from penstock.loadtest.messages import Sample

_KEPT = 20_000


class Record(msgspec.Struct, kw_only=True):
    """One answer. Times are of time.perf_counter, which the processes of a machine share."""

    received: float
    """The request's last byte was read."""
    wanted: int
    """Tokens."""
    writes: list[float] = []
    """For each token, just before it was handed to the kernel."""
    late: list[float] = []
    """For each token, seconds by which that was after it was due."""


class Truth:
    """Of the last requests that were answered in full."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque(maxlen=_KEPT)

    def clear(self) -> None:
        self.records.clear()

    def summary(self, *, each: bool = False) -> dict[str, Any]:
        """The figures as a client would name them, in milliseconds; `each`: the records, too."""
        # numpy, only when a client asks for times: until then this server is nothing but its loop
        from penstock.loadtest.metrics import Distribution, summarize

        origin = min((record.received for record in self.records), default=0.0)
        samples = [
            Sample(
                index=index,
                intended=record.received - origin,
                sent=record.received - origin,
                ended=record.writes[-1] - origin,
                arrivals=[time - origin for time in record.writes],
                output_tokens=record.wanted,
            )
            for index, record in enumerate(self.records)
        ]
        figures = msgspec.to_builtins(summarize(samples, open_loop=False))
        names = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "completed", "output_tokens", "output_tokens_per_s")
        found = {name: figures[name] for name in names}
        found["late_ms"] = msgspec.to_builtins(Distribution.of([late for r in self.records for late in r.late]))
        found["cpu_seconds"] = time.process_time()
        if each:
            found["requests"] = msgspec.to_builtins(list(self.records))
        return found
