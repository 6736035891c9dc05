"""Prometheus families of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engines.encoder.engine import EncoderEngine, EncoderStats

_COUNTERS: tuple[tuple[str, str, Callable[[EncoderStats], float]], ...] = (
    ("encoder_batches", "Batches of texts that were computed.", lambda s: s.batches),
    ("encoder_texts", "Texts that were computed.", lambda s: s.texts),
    ("encoder_tokens", "Tokens of these texts.", lambda s: s.tokens),
    ("encoder_busy_seconds", "Time that computing took.", lambda s: s.busy_seconds),
    ("encoder_failures", "Batches that failed.", lambda s: s.failures),
)


class EncoderMetrics:
    """The label `model` is the served name."""

    def __init__(self, model: str, engine: EncoderEngine) -> None:
        self._model = model
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        requests, tokens = self._engine.waiting
        for name, text, value in (
            ("engine_ready", "1 while the engine serves.", float(self._engine.ready)),
            ("encoder_requests_waiting", "Requests with texts in the queue.", requests),
            ("encoder_tokens_waiting", "Tokens of the texts in the queue.", tokens),
        ):
            gauge = GaugeMetricFamily(f"penstock_{name}", text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(f"penstock_{name}", text, labels=["model"])
            counter.add_metric([self._model], count(self._engine.stats))
            yield counter
