"""Everything that a plan can be told. `penstock.planning.commands` derives the flags from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.loadtest.options import (
    Amount,
    Count,
    File,
    LoadOptions,
    Positive,
    Seconds,
    WorkloadOptions,
    converted,
)

_SomeSeconds = Annotated[float, Meta(gt=0, extra={"unit": "s"})]
_Milliseconds = Annotated[float, Meta(ge=0, le=1e9, extra={"unit": "ms"})]
_Microseconds = Annotated[float, Meta(ge=0, le=1e9, extra={"unit": "us"})]
_Nanoseconds = Annotated[float, Meta(ge=0, le=1e9, extra={"unit": "ns"})]

WORKLOAD = tuple(name for name in WorkloadOptions.__struct_fields__ if name != "token_ids")
LOAD = ("concurrency", "rate", "arrival", "burstiness", "ramp", "duration", "goodput")
"""What of a load test's settings means something without a server."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica's engine. Flags of `penstock serve` have the same names here."""

    measured: Annotated[
        tuple[str, ...],
        Meta(
            extra={"metavar": "FILE"},
            description="JSON of penstock loadtest (a run or a sweep) against one replica, or of penstock bench "
            "engine; may be repeated. From a bench come the times of steps, from load tests what the gateway adds, and "
            "the times of steps where nothing else says them",
        ),
    ] = ()
    sim_step_ms: Annotated[_Milliseconds | None, Meta(description="milliseconds per step")] = None
    sim_prefill_us: Annotated[_Microseconds | None, Meta(description="microseconds per prompt token")] = None
    sim_sequence_us: Annotated[_Microseconds | None, Meta(description="microseconds per sequence in a step")] = None
    sim_attended_ns: Annotated[
        _Nanoseconds | None, Meta(description="nanoseconds per token of context that a token attends to")
    ] = None
    gateway_ms: Annotated[
        _Milliseconds | None,
        Meta(description="milliseconds that gateway and network add to each request; default: measured"),
    ] = None
    template_tokens: Annotated[
        Count | None, Meta(description="tokens that a chat template adds to each prompt; default: measured")
    ] = None
    num_kv_blocks: Annotated[Positive, Meta(description="blocks of the KV cache")] = 8192
    kv_block_size: Annotated[Positive, Meta(description="tokens of a block")] = 16
    max_model_len: Annotated[Positive, Meta(description="prompt and output together, in tokens")] = 32_768
    max_num_seqs: Annotated[Positive, Meta(description="most requests in one step")] = 256
    max_num_batched_tokens: Annotated[
        Positive | None, Meta(description="most tokens in one step; default: 512, or max-num-seqs")
    ] = None
    itl_target_ms: Annotated[
        _Milliseconds, Meta(description="what prompts may lengthen steps to while others generate")
    ] = 200.0
    steps_in_flight: Annotated[Positive, Meta(description="steps that are under way at the same time")] = 2
    max_queued_requests: Annotated[Count, Meta(description="requests that may wait at a replica")] = 1024
    prefix_caching: Annotated[bool, Meta(description="share the blocks of equal beginnings of prompts")] = True


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The replicas and their routing."""

    replicas: Annotated[Positive, Meta(description="how many there are, or with --find-replicas the first number")] = 1
    zones: Annotated[Positive, Meta(description="zones over which they are spread")] = 1
    replica_routing: Annotated[
        Literal["prefix", "least-loaded", "round-robin"], Meta(description="which replica gets a request")
    ] = "prefix"
    resume: Annotated[bool, Meta(description="streams go on elsewhere when their replica dies")] = True
    resume_wait: Annotated[Seconds, Meta(description="seconds for which they wait for a replica that has room")] = 60.0
    replicas_per_gateway: Annotated[
        Positive, Meta(description="most replicas behind one gateway; larger fleets have several, with equal shares")
    ] = 64
    simulated_gateways: Annotated[
        Count,
        Meta(
            description="simulate only so many gateways with their replicas and their share of the requests, and "
            "assume that the rest behaves alike; 0: all"
        ),
    ] = 0
    start_seconds: Annotated[Seconds, Meta(description="seconds until a started or restarted replica serves")] = 60.0
    failure: Annotated[
        tuple[str, ...],
        Meta(
            description="what fails, and when: replica=3@30 (dies after 30 s and starts again), zone=1@60+120 (lost "
            "after 60 s for 120 s; without the second number for good); may be repeated"
        ),
    ] = ()
    price: Annotated[Amount, Meta(description="price of a replica per hour, in any currency; 0: no costs")] = 0.0


class ScalingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas that come and go, by the rule of Kubernetes' autoscaler."""

    autoscale: Annotated[str | None, Meta(description="least and most replicas, as 2:8; default: none")] = None
    scale_queue: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="target: most waiting requests per replica")
    ] = 4.0
    scale_kv: Annotated[
        Annotated[float, Meta(gt=0, le=1)], Meta(description="target: highest used share of the KV cache")
    ] = 0.7
    scale_interval: Annotated[_SomeSeconds, Meta(description="seconds between decisions")] = 15.0
    scale_in_after: Annotated[Seconds, Meta(description="seconds for which fewer replicas must have sufficed")] = 600.0
    scale_in_pause: Annotated[Seconds, Meta(description="seconds between removals of replicas")] = 180.0


class GoalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Goals of the fleet."""

    slo: Annotated[
        tuple[str, ...],
        Meta(
            description="a bound, as ttft_p99:500 (ms; ttft, itl, tpot, e2e with p50, p90, p95, p99, max, mean), "
            "goodput:0.95 (least share), errors:0.01 (largest share, the default); may be repeated"
        ),
    ] = ()
    find_replicas: Annotated[bool, Meta(description="search the smallest number of replicas that keeps --slo")] = False
    most_replicas: Annotated[Positive, Meta(description="find-replicas: no more than these")] = 1024
    slice: Annotated[
        _SomeSeconds,
        Meta(description="seconds of the slices in which the time over the SLO is counted"),
    ] = 5.0


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written."""

    json: Annotated[File | None, Meta(description="write the report as JSON here; - for standard output")] = None


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineOptions = EngineOptions()
    workload: WorkloadOptions = WorkloadOptions()
    load: LoadOptions = LoadOptions()
    fleet: FleetOptions = FleetOptions()
    scaling: ScalingOptions = ScalingOptions()
    goals: GoalOptions = GoalOptions()
    output: OutputOptions = OutputOptions()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "engine": EngineOptions,
    "workload": WorkloadOptions,
    "load": LoadOptions,
    "fleet": FleetOptions,
    "scaling": ScalingOptions,
    "goals": GoalOptions,
    "output": OutputOptions,
}
_OWN = [cls for section, cls in SECTIONS.items() if section not in ("workload", "load")]
SETTINGS = frozenset((*WORKLOAD, *LOAD, *(name for cls in _OWN for name in cls.__struct_fields__)))
_SECTION_OF = {name: section for section, cls in SECTIONS.items() for name in cls.__struct_fields__}


def options(settings: Mapping[str, Any]) -> PlanOptions:
    """From settings by name, as text or as what they are. Raises UsageError, naming the setting."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in settings.items():
        tree[_SECTION_OF[name]][name] = value
    return converted(tree, PlanOptions)
