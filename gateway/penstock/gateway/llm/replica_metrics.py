"""Prometheus families of a model's replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engines.contract.messages import EngineStats
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


def replica_metrics(engine: Replicated, labels: dict[str, str]) -> Iterator[Metric]:
    """Of each replica, and of requests that changed theirs."""
    names, values, state = [*labels, "replica"], list(labels.values()), engine.replica_states()
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"penstock_replica_{name}", text, labels=names)
        for each in state:
            gauge.add_metric([*values, str(each.replica)], value(each))
        yield gauge
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(f"penstock_replica_{name}", text, labels=names)
        for each in state:
            counter.add_metric([*values, str(each.replica)], value(each))
        yield counter
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
