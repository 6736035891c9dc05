"""Triton's Prometheus families, with Triton's names and labels, from the models' statistics when scraped.

Source: Triton's docs/user_guide/metrics.md. Times are in microseconds, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.classic.base import InferModel
from penstock.classic.caching.cache import CacheCounters
from penstock.classic.statistics import ModelStatistics
from penstock.gateway.metrics.host_usage import CpuMeter, memory_bytes
from penstock.gateway.metrics.latencies import ModelLatencies, latency_families
from penstock.gateway.metrics.metrics_config import LatencySettings
from penstock.gateway.metrics.model_labels import model_labels, version_labels
from penstock.gateway.metrics.prometheus_text import Family

REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    ("nv_inference_request_success", "Requests that succeeded.", lambda s: s.success.count),
    ("nv_inference_count", "Inferences; a request with a batch of n counts n.", lambda s: s.inference_count),
    ("nv_inference_exec_count", "Executions of the model.", lambda s: s.execution_count),
)

_LATENCIES: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    (
        "nv_inference_request_duration_us",
        "From arrival to the end of the answer, added up.",
        lambda s: (s.success.ns + s.fail.ns) // 1000,
    ),
    ("nv_inference_queue_duration_us", "Waiting in the queue, added up.", lambda s: s.queue.ns // 1000),
    ("nv_inference_compute_input_duration_us", "Gathering inputs, added up.", lambda s: s.compute_input.ns // 1000),
    ("nv_inference_compute_infer_duration_us", "In the model, added up.", lambda s: s.compute_infer.ns // 1000),
    ("nv_inference_compute_output_duration_us", "Scattering outputs, added up.", lambda s: s.compute_output.ns // 1000),
)

_MODEL_CACHE: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    ("nv_cache_num_hits_per_model", "Responses from the response cache.", lambda s: s.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Requests that the cache did not know.", lambda s: s.cache_miss.count),
    ("nv_cache_hit_duration_per_model", "Looking up responses, added up.", lambda s: s.cache_hit.ns // 1000),
    (
        "nv_cache_miss_duration_per_model",
        "Cache misses: looking up and storing responses, added up.",
        lambda s: s.cache_miss.ns // 1000,
    ),
)

_CACHE: tuple[tuple[str, str, Callable[[CacheCounters], float]], ...] = (
    ("nv_cache_util", "Share of the response cache in use, 0 to 1.", lambda c: c.used / c.capacity),
    ("nv_cache_num_entries", "Responses in the response cache.", lambda c: c.entries),
    ("nv_cache_num_lookups", "Requests that were looked up.", lambda c: c.lookups),
    ("nv_cache_num_hits", "Requests that were found.", lambda c: c.hits),
    ("nv_cache_num_misses", "Requests that were not found.", lambda c: c.lookups - c.hits),
    ("nv_cache_num_evictions", "Responses that made room for others.", lambda c: c.evictions),
    ("nv_cache_lookup_duration", "Looking up, added up.", lambda c: c.lookup_ns // 1000),
    ("nv_cache_insertion_duration", "Keeping responses, added up.", lambda c: c.insertion_ns // 1000),
)


class TritonMetrics:
    """`load_seconds`: seconds that loading took, by (model, version). `cache`: the local response cache's counters.
    `latencies`: which families of latencies there are. `machine`: whether there is nv_cpu_*."""

    def __init__(
        self,
        models: Callable[[], Iterable[InferModel]],
        load_seconds: Callable[[], Mapping[tuple[str, int], float]],
        cache: Callable[[], CacheCounters | None] = lambda: None,
        latencies: LatencySettings | None = None,
        *,
        machine: bool = True,
    ) -> None:
        self._models = models
        self._load_seconds = load_seconds
        self._cache = cache
        self._latencies = latencies or LatencySettings()
        self._cpu = CpuMeter() if machine else None

    def families(self) -> Iterator[Family]:
        models = list(self._models())
        rows = [(model_labels(model), model.statistics) for model in models]
        yield from _counters(_COUNTERS, rows)
        if self._latencies.counters:
            yield from _counters(_LATENCIES, rows)
        failures = Family("nv_inference_request_failure", "counter", "Requests that failed, by reason.")
        pending = Family("nv_inference_pending_request_count", "gauge", "Requests that wait for execution.")
        for labels, statistics in rows:
            for reason in REASONS:
                failures.add({**labels, "reason": reason}, statistics.failures[reason])
            pending.add(labels, statistics.pending)
        yield failures
        yield pending
        loads = Family("nv_model_load_duration_secs", "gauge", "Seconds that loading took.")
        known = {(model.name, model.version): labels for model, (labels, _) in zip(models, rows, strict=True)}
        for key, seconds in self._load_seconds().items():
            loads.add(known.get(key) or version_labels(*key), seconds)
        yield loads
        cached = [row for model, row in zip(models, rows, strict=True) if model.config.response_cache.enable]
        if cached and self._latencies.counters:
            yield from _counters(_MODEL_CACHE, cached)
        observed = [statistics.observer for _, statistics in rows]
        yield from latency_families(self._latencies, [one for one in observed if isinstance(one, ModelLatencies)])
        if (counters := self._cache()) is not None:
            for name, text, count in _CACHE:
                gauge = Family(name, "gauge", text)
                gauge.add({}, count(counters))
                yield gauge
        if self._cpu is not None:
            yield from _machine(self._cpu)


def _machine(cpu: CpuMeter) -> Iterator[Family]:
    total, used = memory_bytes()
    for name, text, value in (
        ("nv_cpu_utilization", "Share of CPU time in use, 0 to 1.", cpu.utilization()),
        ("nv_cpu_memory_total_bytes", "Memory of the machine.", total),
        ("nv_cpu_memory_used_bytes", "Memory in use.", used),
    ):
        family = Family(name, "gauge", text)
        family.add({}, value)
        yield family


def _counters(
    table: Iterable[tuple[str, str, Callable[[ModelStatistics], float]]],
    rows: Iterable[tuple[dict[str, str], ModelStatistics]],
) -> Iterator[Family]:
    for name, text, value in table:
        counter = Family(name, "counter", text)
        for labels, statistics in rows:
            counter.add(labels, value(statistics))
        yield counter
