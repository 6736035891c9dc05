"""Triton's Prometheus families, with Triton's names and labels, from the models' statistics when scraped.

Source: Triton's docs/user_guide/metrics.md. Times are in microseconds, as there.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns

from penstock.classic.base import InferModel
from penstock.classic.caching.cache import CacheCounters
from penstock.classic.model_config import ModelConfig
from penstock.classic.statistics import ModelStatistics
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.metrics.custom import CustomMetric
from penstock.gateway.metrics.machine import CpuMeter, memory_bytes
from penstock.gateway.metrics.prometheus_text import Family


def model_labels(model: InferModel) -> dict[str, str]:
    """With the model's `metric_tags`, before whose names Triton puts an underscore."""
    tags = {f"_{name}": value for name, value in model.config.metric_tags.items()}
    return version_labels(model.name, model.version) | tags


def version_labels(name: str, version: int) -> dict[str, str]:
    return {"model": name, "version": str(version)}


# Latencies of single requests: settings as `--metrics-config` has them, summaries, and the histogram of first responses

_FLAG = "metrics-config"
_BOOLEANS = {"true": True, "false": False}
_MAX_QUANTILES = 100
_DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """Which latencies are shown."""

    counters: bool = True
    histograms: bool = False
    summaries: bool = False
    quantiles: tuple[float, ...] = _DEFAULT_QUANTILES
    """Of the summaries, each from 0 to 1."""


def read_metrics_config(texts: Iterable[str]) -> LatencySettings:
    """From `SETTING=VALUE`; the last one of a name counts. Raises ConfigError."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in _SETTINGS:
            raise ConfigError(f"{_FLAG}: {text!r} is not SETTING=VALUE with one of {', '.join(_SETTINGS)}")
        values[name] = value
    return LatencySettings(
        counters=_boolean(values, "counter_latencies", default=True),
        histograms=_boolean(values, "histogram_latencies", default=False),
        summaries=_boolean(values, "summary_latencies", default=False),
        quantiles=_quantiles(values["summary_quantiles"]) if "summary_quantiles" in values else _DEFAULT_QUANTILES,
    )


_SETTINGS = ("counter_latencies", "histogram_latencies", "summary_latencies", "summary_quantiles")


def _boolean(values: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = values.get(name)
    if value is None:
        return default
    if value not in _BOOLEANS:
        raise ConfigError(f"{_FLAG}: {name} is true or false, not {value!r}")
    return _BOOLEANS[value]


def _quantiles(text: str) -> tuple[float, ...]:
    """From `0.5:0.05,0.9:0.01`: a quantile and the error that is allowed for it. Ours are always more exact."""
    shares = [_share(pair) for pair in text.split(",")]
    if len(set(shares)) < len(shares) or len(shares) > _MAX_QUANTILES:
        raise ConfigError(f"{_FLAG}: summary_quantiles needs different quantiles, at most {_MAX_QUANTILES}")
    return tuple(shares)


def _share(pair: str) -> float:
    try:
        share, error = (float(part) for part in pair.split(":"))
    except ValueError:
        raise ConfigError(f"{_FLAG}: summary_quantiles: {pair!r} is not QUANTILE:ERROR") from None
    if not (0 <= share <= 1 and 0 <= error <= 1):
        raise ConfigError(f"{_FLAG}: summary_quantiles: {pair!r}: both numbers must be from 0 to 1")
    return share


SLICE_NS = 12_000_000_000
SLICES = 5
"""Quantiles are of the last 48 to 60 seconds, as those of Triton's summaries."""

_MANTISSA_BITS = 8


class SlidingSummary:
    """Of whole numbers from 0. Values below 256 are kept as they are, larger ones within 0.4 %.

    Values are counted in bins whose width grows with the value: memory depends on how far values spread, not on how
    many there are, and `observe` costs a bin's index and an addition.
    """

    __slots__ = ("_slices", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        self._slices: deque[tuple[int, Counter[int]]] = deque(maxlen=SLICES)
        """(number of the slice of time, how many values are in each bin)."""

    def observe(self, value: int, now_ns: int) -> None:
        """`now_ns` must not go backwards."""
        self.count += 1
        self.sum += value
        slices, number = self._slices, now_ns // SLICE_NS
        if not slices or slices[-1][0] != number:
            slices.append((number, Counter()))
        shift = max(0, value.bit_length() - _MANTISSA_BITS)
        slices[-1][1][shift << _MANTISSA_BITS | value >> shift] += 1

    def quantiles(self, shares: Sequence[float], now_ns: int) -> list[float]:
        """For each share the smallest value that so large a share of recent ones does not exceed; NaN without any."""
        oldest = now_ns // SLICE_NS - SLICES
        recent: Counter[int] = Counter()
        for number, counts in self._slices:
            if number > oldest:
                recent.update(counts)
        bins, total = sorted(recent.items()), recent.total()
        return [_at_rank(bins, max(1, math.ceil(share * total))) for share in shares]


def _at_rank(bins: Sequence[tuple[int, int]], rank: int) -> float:
    """The middle of the bin that holds the value of this rank, from 1."""
    for index, count in bins:
        rank -= count
        if rank <= 0:
            shift = index >> _MANTISSA_BITS
            return ((index & ((1 << _MANTISSA_BITS) - 1)) << shift) + ((1 << shift) >> 1)
    return math.nan


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_FIRST_RESPONSE_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)

_QUEUE = ("nv_inference_queue_summary_us", "Waiting in the queue.")
_SUMMARIES = (
    ("nv_inference_request_summary_us", "From arrival to the end of the answer."),
    _QUEUE,
    ("nv_inference_compute_input_summary_us", "Gathering inputs."),
    ("nv_inference_compute_infer_summary_us", "In the model."),
    ("nv_inference_compute_output_summary_us", "Scattering outputs."),
)
_HIT = ("nv_cache_hit_summary_per_model", "Looking up responses.")
_MISS = ("nv_cache_miss_summary_per_model", "Cache misses: looking up and storing responses.")


class ModelLatencies:
    """Implements LatencyObserver for one model version; it keeps what the settings show of such a model.

    As in Triton a model with a response cache has no summary of whole requests, and only decoupled models have the
    histogram.
    """

    def __init__(self, settings: LatencySettings, model: InferModel) -> None:
        config = model.config
        self.labels = model_labels(model)
        self.summaries: dict[str, SlidingSummary] = {}
        cached = config.response_cache.enable
        if settings.summaries:
            shown = (*_SUMMARIES[1:], _HIT, _MISS) if cached else _SUMMARIES
            self.summaries = {name: SlidingSummary() for name, _ in shown}
        self.first: CustomMetric | None = None
        if settings.histograms and config.model_transaction_policy.decoupled:
            self.first = CustomMetric("HISTOGRAM", self.labels, _buckets(config))
        self._of_request = [self.summaries.get(name) for name, _ in _SUMMARIES]

    def request(self, total: int, queue: int, compute_input: int, compute_infer: int, compute_output: int) -> None:
        now = monotonic_ns()
        durations = (total, queue, compute_input, compute_infer, compute_output)
        for summary, duration in zip(self._of_request, durations, strict=True):
            if summary is not None:
                summary.observe(duration // 1000, now)

    def cache_hit(self, ns: int) -> None:
        self._observe(_QUEUE[0], 0)
        self._observe(_HIT[0], ns)

    def cache_miss(self, ns: int) -> None:
        self._observe(_MISS[0], ns)

    def first_response(self, ns: int) -> None:
        if self.first is not None:
            self.first.observe(ns / 1e6)

    def _observe(self, name: str, ns: int) -> None:
        if (summary := self.summaries.get(name)) is not None:
            summary.observe(ns // 1000, monotonic_ns())


def _buckets(config: ModelConfig) -> tuple[float, ...]:
    """The last of `model_metrics` counts, as in Triton."""
    buckets = [control.histogram_options.buckets for control in config.model_metrics.metric_control]
    return tuple(buckets[-1]) if buckets else _FIRST_RESPONSE_BUCKETS


def latency_observers(settings: LatencySettings) -> Callable[[InferModel], None] | None:
    """Call what this returns with each model before it serves. None: the settings ask for nothing, nothing is kept."""
    return partial(_attach, settings) if settings.histograms or settings.summaries else None


def _attach(settings: LatencySettings, model: InferModel) -> None:
    model.statistics.observer = ModelLatencies(settings, model)


def latency_families(settings: LatencySettings, observed: Sequence[ModelLatencies]) -> Iterator[Family]:
    """Triton's families; those that no model has are left out, as Triton leaves them out."""
    histogram = Family(FIRST_RESPONSE, "histogram", "From arrival to the first response, in milliseconds.")
    for latencies in observed:
        if latencies.first is not None:
            latencies.first.samples(histogram)
    families = [histogram]
    now = monotonic_ns()
    for name, text in (*_SUMMARIES, _HIT, _MISS):
        family = Family(name, "summary", f"{text} Quantiles are of the last minute.")
        for latencies in observed:
            if (summary := latencies.summaries.get(name)) is not None:
                _add(family, latencies.labels, summary, settings.quantiles, now)
        families.append(family)
    return (family for family in families if family.samples)


def _add(
    family: Family, labels: Mapping[str, str], summary: SlidingSummary, quantiles: tuple[float, ...], now_ns: int
) -> None:
    family.add(labels, summary.count, "_count")
    family.add(labels, summary.sum, "_sum")
    for share, value in zip(quantiles, summary.quantiles(quantiles, now_ns), strict=True):
        family.add({**labels, "quantile": f"{share:g}"}, value)


# The families, when scraped

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
