"""The report of a load test. As JSON its figures stand at the top level, under the names of `Figures`."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.loadtest.metrics import Distribution, Figures
from penstock.loadtest.options import Options

SCHEMA = "penstock-loadtest/1"


class Validity(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the figures are the server's, or the client's."""

    verdict: str
    """`valid`, `doubtful` (see the reasons), or `invalid`: the client was the bottleneck, or the run is none."""
    reasons: list[str] = []
    client_cores: float = 0.0
    """CPU that the client processes used together."""
    busiest_client: float = 0.0
    """Of the busiest client process: its share of one core."""
    lag_ms: Distribution | None = None
    """By how much the clients' event loops were late."""
    send_lag_ms: Distribution | None = None
    """Open loop: by how much requests were sent later than intended, but for the time that a new connection took."""
    pieces_per_read: float = 0.0
    """Above 1: pieces of output came together, by the server's doing or by the client's lateness."""
    floor_ms: dict[str, float] = {}
    """What the same client measures of the built-in server that answers at once: `ttft` and `itl` of this machine, or
    `e2e` where nothing is streamed."""
    floor_protocol: str = ""
    """With which that was measured: where the built-in server does not speak the run's, another one stands in."""
    ceiling_tokens_per_s: float = 0.0
    """Streamed tokens that this client can take, for each of its processes; 0: not measured."""
    ceiling_share: float = 0.0
    """How near the run came to that."""
    clock_ms: float = 0.0
    """By how much the time of day moved against the clock that latencies are taken with: it was set, or the machine was
    suspended."""
    processes: int = 1
    """Client processes."""
    lost_processes: int = 0
    """Those that ended before their time."""


class ServerWatch(msgspec.Struct, frozen=True, kw_only=True):
    """What the server said of itself during the run, and what was seen of its processes."""

    metrics_url: str = ""
    metrics: dict[str, list[float]] = {}
    """Gauges by name: one value for each of `seconds`."""
    counters: dict[str, float] = {}
    """How much counters have grown during the run."""
    seconds: list[float] = []
    gpu: dict[str, list[float]] = {}
    """Utilization (%) and memory (bytes) of each GPU of this machine, for each of `seconds`."""
    cores: float | None = None
    """CPU that its processes used, where they run on this machine."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The run in slices of equal length."""

    seconds: float
    """Length of a slice."""
    output_tokens_per_s: list[float]
    requests_per_s: list[float]
    """Completed."""
    in_flight: list[float]
    """Mean number of requests on their way."""
    ttft_ms: list[float | None]
    """Median of the requests that began in the slice."""
    errors: list[int]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """How often a latency was how long, in bins that are each 1 % wider than the one before: see report.histogram."""

    first: int
    """Number of the first bin that `counts` holds."""
    counts: list[int]
    below: int = 0
    """Values under 0.01 ms: pieces of output that one read brought together."""
    absent: int = 0
    """Complete requests that have no such figure (one token has no TPOT)."""
    failed: int = 0


class Interval(msgspec.Struct, frozen=True):
    """Of a figure over repeats: the mean's confidence interval at 95 % (Student's t)."""

    low: float
    high: float


class Report(Figures, frozen=True, kw_only=True):
    """Top-level figures: the run's, or with repeats the median of the runs' (of each figure by itself)."""

    schema: str = SCHEMA
    label: str
    date: str
    """ISO 8601, of the start."""
    command: str
    """That makes such a run again."""
    options: Options
    validity: Validity
    runs: list[Figures]
    intervals: dict[str, Interval] = msgspec.field(default_factory=dict)
    """By path, as `ttft_ms.p99` or `output_tokens_per_s`; with 3 runs or more."""
    tokens: dict[str, Any] = msgspec.field(default_factory=dict)
    """Where token counts come from, and what did not agree."""
    timeline: Timeline | None = None
    """Of the last run."""
    histograms: dict[str, Histogram] = msgspec.field(default_factory=dict)
    """`ttft_ms`, `tpot_ms`, `itl_ms`, `e2e_ms` and `longest_gap_ms` (of each request), of the samples at hand."""
    server: ServerWatch | None = None
    environment: dict[str, Any] = msgspec.field(default_factory=dict)
    """Machine, versions, and what else used the CPUs."""
    interrupted_by_user: bool = False

    @property
    def ended(self) -> int:
        """Requests of all runs that were completed or failed: `errors` are those of all runs, `completed` a median."""
        return sum(run.completed + run.failed for run in self.runs)
