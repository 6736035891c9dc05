"""The figures that every form of a report shows, in their order and under their titles."""

from __future__ import annotations

from typing import NamedTuple

from penstock.loadtest.metrics import Figures
from penstock.loadtest.options import Options


class Figure(NamedTuple):
    path: str
    """In a report, as `ttft_ms.p50`."""
    title: str
    unit: str
    more_is_better: bool


LATENCIES = {
    "ttft_ms": ("TTFT", "time to first token"),
    "itl_ms": ("ITL", "gaps between pieces of output, of all requests together"),
    "tpot_ms": ("TPOT", "time per output token after the first, one value for each request"),
    "e2e_ms": ("E2E", "whole request"),
}
"""Field, short name, what it is."""

STATISTICS = ("p50", "p90", "p95", "p99", "max", "mean", "min", "std", "count")

RATES = (
    Figure("output_tokens_per_s", "Output tokens/s", "", True),
    Figure("total_tokens_per_s", "All tokens/s", "", True),
    Figure("requests_per_s", "Requests/s", "", True),
)
GOODPUT = (
    Figure("goodput.requests_per_s", "Good requests/s", "", True),
    Figure("goodput.share", "Share of good requests", "", True),
)
COMPARED = (
    *RATES,
    *(
        Figure(f"{field}.{statistic}", f"{name} {statistic}", "ms", False)
        for field, (name, _) in LATENCIES.items()
        for statistic in ("p50", "p99")
    ),
    *GOODPUT,
)


def value(figures: Figures, path: str) -> float | None:
    """None where this run has no such figure."""
    part: object = figures
    for name in path.split("."):
        part = getattr(part, name, None)
    return float(part) if isinstance(part, int | float) else None


def load_name(options: Options) -> str:
    """In two words: `8 at a time`, `4/s poisson`."""
    load = options.load
    if options.workload.trace is not None:
        return "as recorded" if options.workload.trace_speed == 1 else f"{options.workload.trace_speed:g} x as recorded"
    if load.rate is not None:
        return f"{load.rate:g}/s {load.arrival}"
    return f"{load.concurrency} at a time"
