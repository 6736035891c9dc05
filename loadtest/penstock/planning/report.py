"""The report of a plan: the structs are the JSON. Its figures stand at the top level, as those of a load test."""

from __future__ import annotations

import msgspec

from penstock.loadtest.metrics import Distribution, Figures
from penstock.planning.engine import StepModel
from penstock.planning.options import PlanOptions

SCHEMA = "penstock-plan/1"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica is assumed to be."""

    step: StepModel
    """Seconds."""
    gateway_ms: float
    template_tokens: int
    fit: dict[str, list[float]] = {}
    """By figure of the load tests, as `ttft_ms.p50`: measured / simulated, one for each of them."""
    notes: list[str] = []


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the replicas did. Those that were not simulated are assumed to be alike."""

    replicas_mean: float
    """That serve."""
    replicas_most: int
    replica_hours: float
    """Paid for: from the start of a replica to its end."""
    kv_use_mean: float
    """Share of the KV cache that requests hold, of all replicas that serve and the whole run."""
    kv_use_max: float
    """The highest of one replica."""
    busy: float
    """Share of the paid time in which steps were computed."""
    prefix_hits: float
    """Share of the prompts' tokens that were in the prefix cache."""
    preemptions: int
    failed_over: int
    """Requests without a token whose replica had died or refused them, and that went to another one."""
    resumed: int
    """Streams that went on behind their tokens."""
    cost: float | None = None
    """Of the replica-hours; None: no price is known."""
    cost_per_million_output_tokens: float | None = None
    cost_per_million_tokens: float | None = None
    """Of prompts and outputs."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the run. Latencies are those of the requests that were due in it."""

    begin: float
    requests: int
    failed: int
    ttft_ms: Distribution | None
    e2e_ms: Distribution | None
    replicas: float
    """That serve, on average."""
    kv_use: float
    over: list[str] = []
    """Bounds of the SLO that these requests break."""


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    """As it was asked for."""
    at: float
    hit: int
    """Requests that the replicas had."""
    resumed: int
    """That had tokens, and were completed elsewhere."""
    moved: int
    """That had none, and were completed elsewhere."""
    failed: int
    over_slo_s: float | None
    """Seconds from the failure to the end of the last slice over the SLO, where the slices before were within; 0: none
    is over. None: there is no SLO, or it was broken before."""


class Bounded(msgspec.Struct, frozen=True, kw_only=True):
    bound: str
    held: bool
    margin: float
    """Estimated / allowed; above 1 it is broken."""


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One number of replicas of a search."""

    replicas: int
    held: bool
    misses: list[str]


class PlanReport(Figures, frozen=True, kw_only=True):
    schema: str = SCHEMA
    date: str
    command: str
    options: PlanOptions
    calibration: Calibration
    fleet: FleetFigures
    slo: list[Bounded]
    over_slo_s: float | None
    """Seconds of the slices that are over it; None: there is no SLO."""
    tries: list[Try]
    replicas_needed: int | None
    """The least that keeps the SLO; None: it was not searched, or not found."""
    failures: list[FailureReport]
    slices: list[Slice]
    simulated_requests: int
    simulated_per_s: float
    """Requests that were simulated in a second of this process's CPU time."""
    notes: list[str]
