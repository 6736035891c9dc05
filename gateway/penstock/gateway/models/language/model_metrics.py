"""Prometheus families for the life of a request. What the engine knows comes from its newest stats, when scraped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import StepRecord
from penstock.engines.process.liveness import Liveness
from penstock.engines.replicas.state import ReplicaState, Replicated
from penstock.gateway.metrics.request_metrics import Histogram
from penstock.gateway.models.language.adapters import AdapterSet

_LATENCY = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("requests_running", "Requests in the running batch.", lambda s: s.num_running),
    ("requests_waiting", "Requests in the queue.", lambda s: s.num_waiting),
    ("tokens_waiting", "Known tokens of the requests in the queue.", lambda s: s.num_waiting_tokens),
    ("kv_cache_blocks", "Blocks of the KV cache.", lambda s: s.num_blocks),
    ("kv_cache_free_blocks", "Blocks that no request holds.", lambda s: s.num_free_blocks),
    ("kv_cache_cached_blocks", "Blocks in the prefix cache, held or not.", lambda s: s.num_cached_blocks),
    (
        "kv_cache_usage_ratio",
        "Share of blocks that requests hold, 0 to 1.",
        lambda s: 1 - s.num_free_blocks / s.num_blocks if s.num_blocks else 0,
    ),
    ("recurrent_state_rows", "Rows of the states of recurrent layers; 0: it has none.", lambda s: s.num_state_rows),
    ("recurrent_state_free_rows", "Rows that no request holds.", lambda s: s.num_free_state_rows),
    ("kv_offload_blocks", "Evicted blocks that are kept in files.", lambda s: s.offload.blocks),
    ("kv_offload_bytes", "Bytes of these files in use.", lambda s: s.offload.bytes),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("engine_admitted", "Samples that the engine has taken in.", lambda s: s.admitted),
    ("prompt_tokens", "Prompt tokens computed; prefix hits are not among them.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("preemptions", "Requests that lost their blocks and were computed again.", lambda s: s.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("engine_steps", "Iterations of the engine.", lambda s: s.steps),
    ("engine_step_failures", "Iterations that failed.", lambda s: s.step_failures),
    ("spec_decode_draft_tokens", "Guessed tokens that were verified (speculative decoding).", lambda s: s.draft_tokens),
    ("spec_decode_accepted_tokens", "Guessed tokens that were right.", lambda s: s.accepted_tokens),
    ("forced_tokens", "Tokens that a grammar left no choice about, computed beside others.", lambda s: s.forced_tokens),
    ("kv_offload_saved_blocks", "Evicted blocks that were written to files.", lambda s: s.offload.saved),
    ("kv_offload_dropped_blocks", "Evicted blocks that were not written.", lambda s: s.offload.dropped),
    ("kv_offload_loaded_blocks", "Blocks that came back from files.", lambda s: s.offload.loaded),
    ("kv_offload_damaged_blocks", "Blocks in files that did not hold what they should.", lambda s: s.offload.damaged),
    ("kv_offload_waits", "Requests that waited for blocks from files.", lambda s: s.offload.waits),
    ("kv_offload_wait_seconds", "How long they waited, together.", lambda s: s.offload.wait_seconds),
)


class ModelMetrics:
    """One model's metrics. The label `model` is the served name, never what a client sent."""

    def __init__(
        self,
        model: str,
        stats: Callable[[], EngineStats],
        ready: Callable[[], bool],
        adapters: AdapterSet | None = None,
        liveness: Callable[[], Liveness] | None = None,
        asleep: Callable[[], bool] = lambda: False,
        replicas: Replicated | None = None,
    ) -> None:
        """`liveness`: of an engine in a process of its own. `replicas`: of an engine that is several."""
        self._asleep = asleep
        self._adapters = adapters
        self._liveness = liveness
        self._replicas = replicas
        self._labels = {"model": model}
        self._stats = stats
        self._ready = ready
        self._finished: Counter[str] = Counter()
        self._ttft = Histogram("penstock_time_to_first_token_seconds", "From arrival to the first token.", _LATENCY)
        self._itl = Histogram("penstock_inter_token_latency_seconds", "Between two tokens of a choice.", _GAP)
        self._e2e = Histogram(
            "penstock_request_duration_seconds", "From arrival to the last token, of complete answers.", _LATENCY
        )
        self._queue = Histogram("penstock_queue_time_seconds", "From arrival to the first step.", _LATENCY)
        self._step = Histogram("penstock_step_duration_seconds", "Duration of an iteration.", _GAP)
        self._batch = Histogram("penstock_step_requests", "Requests in an iteration.", _SIZE)
        self._batch_tokens = Histogram("penstock_step_tokens", "Tokens in an iteration.", _SIZE)

    def step(self, step: StepRecord) -> None:
        """Once for each of the engine's steps."""
        self._step.observe(step.seconds)
        self._batch.observe(step.num_requests)
        self._batch_tokens.observe(step.num_tokens)

    def tokens(self, count: int, last: float | None, now: float, arrival: float, choices: int = 1) -> None:
        """`count` tokens of so many equal choices came at `now`; the one before at `last`, None if these are the first.

        Tokens that come together share the time since the last one evenly.
        """
        if last is not None:
            self._itl.observe((now - last) / count, count * choices)
            return
        self._ttft.observe(now - arrival, choices)
        if count > 1:
            self._itl.observe(0.0, (count - 1) * choices)

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def finished(self, reason: str, seconds: float, choices: int = 1) -> None:
        """Choices have ended: stop, length, abort, or error:<code>. Only complete ones have a duration to speak of."""
        self._finished[reason] += choices
        if reason in ("stop", "length"):
            self._e2e.observe(seconds, choices)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engine()
        yield from self.of_requests()

    def _of_engine(self) -> Iterator[Metric]:
        stats, names, values = self._stats(), list(self._labels), list(self._labels.values())
        yield self._gauge("engine_ready", "1 while the engine serves.", float(self._ready()))
        yield self._gauge("engine_asleep", "1 while the model sleeps: its memory is given back.", float(self._asleep()))
        if self._liveness is not None and not self._asleep():
            yield from self._pulse(self._liveness())
        for name, text, value in _GAUGES:
            yield self._gauge(name, text, value(stats))
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"penstock_{name}", text, labels=names)
            counter.add_metric(values, value(stats))
            yield counter
        for histogram in (self._step, self._batch, self._batch_tokens):
            yield from histogram.samples(self._labels)
        if self._adapters is not None and self._adapters.max_loaded:
            yield from self._lora(self._adapters)
        if self._replicas is not None:
            yield from replica_metrics(self._replicas, self._labels)

    def of_requests(self) -> Iterator[Metric]:
        """What the process that has read the requests knows of them."""
        names, values = list(self._labels), list(self._labels.values())
        ends = CounterMetricFamily(
            "penstock_requests_finished", "Choices by the way they ended.", labels=[*names, "finish_reason"]
        )
        for reason, count in self._finished.items():
            ends.add_metric([*values, reason], count)
        yield ends
        for histogram in (self._ttft, self._itl, self._e2e, self._queue):
            yield from histogram.samples(self._labels)
        if self._adapters is not None and self._adapters.max_loaded:
            calls = GaugeMetricFamily(
                "penstock_lora_requests", "Calls that an adapter serves.", labels=[*names, "adapter"]
            )
            for adapter in self._adapters:
                calls.add_metric([*values, adapter.name], adapter.in_flight.calls)
            yield calls

    def _pulse(self, liveness: Liveness) -> Iterator[Metric]:
        silence = liveness.silence(time.monotonic())
        yield self._gauge("engine_heartbeat_age_seconds", "Since the engine process was last heard of.", silence)
        text = "How long the engine's step under way had taken at its newest heartbeat; 0 with none."
        yield self._gauge("engine_step_age_seconds", text, liveness.step_seconds)

    def _lora(self, adapters: AdapterSet) -> Iterator[Metric]:
        yield self._gauge("lora_adapters", "LoRA adapters that are loaded.", len(adapters))
        yield self._gauge("lora_adapters_max", "LoRA adapters that the engine has room for.", adapters.max_loaded)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"penstock_{name}", text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge


def _usage(stats: EngineStats) -> float:
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0


_REPLICA_GAUGES: tuple[tuple[str, str, Callable[[ReplicaState], float]], ...] = (
    ("ready", "1 while the replica serves.", lambda r: float(r.ready)),
    ("requests_running", "Requests in its running batch.", lambda r: r.stats.num_running),
    ("requests_waiting", "Requests in its queue.", lambda r: r.stats.num_waiting),
    ("kv_cache_usage_ratio", "Share of its blocks that requests hold, 0 to 1.", lambda r: _usage(r.stats)),
)
_REPLICA_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaState], float]], ...] = (
    ("routed", "Samples that it was sent.", lambda r: r.routed),
    ("restarts", "How often all that it held was lost.", lambda r: r.restarts),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in its prefix cache since its start.",
        lambda r: r.stats.prefix_queries,
    ),
    ("prefix_cache_hits", "Prompt tokens found there.", lambda r: r.stats.prefix_hits),
    ("generation_tokens", "Tokens that it has generated since its start.", lambda r: r.stats.generation_tokens),
)


_HANDOVER_GAUGES: tuple[tuple[str, str, Callable[[ReplicaState], float]], ...] = (
    ("handover_bytes", "Shared memory that its blocks take.", lambda r: r.stats.handover.bytes),
)
_HANDOVER_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaState], float]], ...] = (
    ("handover_saved_blocks", "Blocks that it has put into shared memory.", lambda r: r.stats.handover.saved),
    ("handover_loaded_blocks", "Blocks that it has taken from there.", lambda r: r.stats.handover.loaded),
    ("handover_lost_blocks", "Blocks that were overwritten before it read them.", lambda r: r.stats.handover.lost),
    (
        "handover_missed_tokens",
        "Prompt tokens in full blocks that it computed again although another replica had.",
        lambda r: r.stats.handover.missed_tokens,
    ),
    ("handover_waits", "Requests that waited for their blocks.", lambda r: r.stats.handover.waits),
    ("handover_wait_seconds", "How long they waited, together.", lambda r: r.stats.handover.wait_seconds),
)


def replica_metrics(engine: Replicated, labels: dict[str, str]) -> Iterator[Metric]:
    """Of each replica, and of requests that changed theirs."""
    names, values, state = [*labels, "replica"], list(labels.values()), engine.replica_states()
    for name, text, value in (*_REPLICA_GAUGES, *(_HANDOVER_GAUGES if engine.has_roles else ())):
        gauge = GaugeMetricFamily(f"penstock_replica_{name}", text, labels=names)
        for replica in state:
            gauge.add_metric([*values, str(replica.replica)], value(replica))
        yield gauge
    for name, text, value in (*_REPLICA_COUNTERS, *(_HANDOVER_COUNTERS if engine.has_roles else ())):
        counter = CounterMetricFamily(f"penstock_replica_{name}", text, labels=names)
        for replica in state:
            counter.add_metric([*values, str(replica.replica)], value(replica))
        yield counter
    if engine.has_roles:
        handovers = CounterMetricFamily(
            "penstock_replica_handovers",
            "Samples that went on at another replica than the one that computed their prompt.",
            labels=list(labels),
        )
        handovers.add_metric(values, engine.moves.handed_over)
        yield handovers
    yield from _moves(engine, list(labels), values)


def _moves(engine: Replicated, names: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
    moves = engine.moves
    family = CounterMetricFamily(
        "penstock_replica_moves",
        "Samples whose replica died or refused them: sent to another before their first token (failed_over), gone on "
        "with behind their tokens (resumed), or ended with an error (given_up).",
        labels=[*names, "outcome"],
    )
    for outcome in ("failed_over", "resumed", "given_up"):
        family.add_metric([*values, outcome], getattr(moves, outcome))
    yield family
