"""Prometheus families of a model's replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.replicas.state import ReplicaState, Replicated


def _usage(stats: EngineStats) -> float:
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0


_GAUGES: tuple[tuple[str, str, Callable[[ReplicaState], float]], ...] = (
    ("ready", "1 while the replica serves.", lambda r: float(r.ready)),
    ("requests_running", "Requests in its running batch.", lambda r: r.stats.num_running),
    ("requests_waiting", "Requests in its queue.", lambda r: r.stats.num_waiting),
    ("kv_cache_usage_ratio", "Share of its blocks that requests hold, 0 to 1.", lambda r: _usage(r.stats)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaState], float]], ...] = (
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
    for name, text, value in (*_GAUGES, *(_HANDOVER_GAUGES if engine.has_roles else ())):
        gauge = GaugeMetricFamily(f"penstock_replica_{name}", text, labels=names)
        for each in state:
            gauge.add_metric([*values, str(each.replica)], value(each))
        yield gauge
    for name, text, value in (*_COUNTERS, *(_HANDOVER_COUNTERS if engine.has_roles else ())):
        counter = CounterMetricFamily(f"penstock_replica_{name}", text, labels=names)
        for each in state:
            counter.add_metric([*values, str(each.replica)], value(each))
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
