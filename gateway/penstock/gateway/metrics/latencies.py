"""Latencies of a model's single requests, as Triton's summaries and its histogram of first responses show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic_ns

from penstock.classic.base import InferModel
from penstock.classic.model_config import ModelConfig
from penstock.gateway.metrics.custom import CustomMetric
from penstock.gateway.metrics.metrics_config import LatencySettings
from penstock.gateway.metrics.model_labels import model_labels
from penstock.gateway.metrics.prometheus_text import Family
from penstock.gateway.metrics.sliding_summary import SlidingSummary

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
    given = [control.histogram_options.buckets for control in config.model_metrics.metric_control]
    return tuple(given[-1]) if given else _FIRST_RESPONSE_BUCKETS


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
