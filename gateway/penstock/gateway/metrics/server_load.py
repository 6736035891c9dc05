"""The server's load as balancers are told it: how full its engines are, how many requests end in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.engines.contract.engine_stats import EngineStats
from penstock.gateway.metrics.machine import CpuMeter, memory_bytes
from penstock.gateway.metrics.request_metrics import EndedRequests
from penstock.gateway.requests.load_report import LoadReport


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
