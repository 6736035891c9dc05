"""The server's load as balancers are told it: how full its engines are, and how many requests end in a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.engines.contract.engine_stats import EngineStats
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.load_report import LoadReport
from penstock.gateway.front.record import Outcome
from penstock.gateway.metrics.machine import CpuMeter, memory_bytes

_WINDOW = 10
"""Seconds over which ends are counted."""
_FAILURES = frozenset({Outcome.SERVER_ERROR, Outcome.REFUSED, Outcome.DEADLINE})
"""What is the server's fault, or its load's."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A language model at this moment."""

    stats: EngineStats
    block_size: int
    """Tokens of a block of its KV cache."""
    max_num_seqs: int
    """Requests that it can compute together."""

    @property
    def utilization(self) -> float:
        """The scarcer of seats and blocks. Waiting requests count like running ones, so it can exceed 1."""
        stats = self.stats
        blocks = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        return max((stats.num_running + stats.num_waiting) / self.max_num_seqs, blocks)


class EndedRequests:
    """How many inferences have ended in each of the last seconds. A hook of the journal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: deque[tuple[int, list[int]]] = deque()
        """(second, [ended, failed]), the newest last."""

    def __call__(self, context: RequestContext) -> None:
        if not context.infers:
            return
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0, 0]))
            self._forget(second)
        counts = self._seconds[-1][1]
        counts[0] += 1
        counts[1] += context.record.outcome in _FAILURES

    def per_second(self) -> tuple[float, float]:
        """(ended, failed). The second that has just begun counts with the part of it that is over."""
        now = self._clock()
        self._forget(int(now))
        span = min(now - self._began, now - int(now) + _WINDOW - 1)
        ended, failed = (sum(counts[which] for _, counts in self._seconds) for which in (0, 1))
        return (ended / span, failed / span) if span > 0 else (0.0, 0.0)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - _WINDOW:
            self._seconds.popleft()


class ServerLoad:
    """Measures what `LoadReporter` tells."""

    def __init__(self, engines: Callable[[], Iterable[EngineLoad]], ended: EndedRequests) -> None:
        self._engines = engines
        self._ended = ended
        self._cpu = CpuMeter()
        self._cpu_share = 0.0
        self._looked = time.monotonic()

    def __call__(self) -> LoadReport:
        engines = list(self._engines())
        rps, eps = self._ended.per_second()
        total, used = memory_bytes()
        return LoadReport(
            application_utilization=max((engine.utilization for engine in engines), default=0.0),
            cpu_utilization=self._cpu_utilization(),
            mem_utilization=used / total if total else 0.0,
            rps_fractional=rps,
            eps=eps,
            named_metrics=_engine_metrics(engines) if engines else {},
        )

    def _cpu_utilization(self) -> float:
        """Over a second at least: ticks of the system's clock are coarse."""
        now = time.monotonic()
        if now - self._looked >= 1.0:
            self._looked = now
            self._cpu_share = self._cpu.utilization()
        return self._cpu_share


def _engine_metrics(engines: list[EngineLoad]) -> dict[str, float]:
    """The first two have Triton's names, the others vLLM's."""
    total = sum(engine.stats.num_blocks * engine.block_size for engine in engines)
    free = sum(engine.stats.num_free_blocks * engine.block_size for engine in engines)
    return {
        "kv_cache_utilization": 1 - free / total if total else 0.0,
        "max_token_capacity": float(total),
        "num_requests_waiting": float(sum(engine.stats.num_waiting for engine in engines)),
        "num_requests_running": float(sum(engine.stats.num_running for engine in engines)),
    }
