"""Triton's Prometheus families, with Triton's names and labels, from the models' statistics when scraped.

Source: Triton's docs/user_guide/metrics.md. Times are in microseconds, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.classic.base import InferModel
from penstock.classic.statistics import ModelStatistics
from penstock.gateway.metrics.host_usage import CpuMeter, memory_bytes
from penstock.gateway.metrics.prometheus_text import Family

REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    ("nv_inference_request_success", "Requests that succeeded.", lambda s: s.success.count),
    ("nv_inference_count", "Inferences; a request with a batch of n counts n.", lambda s: s.inference_count),
    ("nv_inference_exec_count", "Executions of the model.", lambda s: s.execution_count),
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


class TritonMetrics:
    """`load_seconds`: seconds that loading took, by (model, version)."""

    def __init__(
        self,
        models: Callable[[], Iterable[InferModel]],
        load_seconds: Callable[[], Mapping[tuple[str, int], float]],
    ) -> None:
        self._models = models
        self._load_seconds = load_seconds
        self._cpu = CpuMeter()

    def families(self) -> Iterator[Family]:
        models = list(self._models())
        tags = {(model.name, model.version): dict(model.config.metric_tags) for model in models}
        rows = [
            (_labels(model.name, model.version) | tags[model.name, model.version], model.statistics) for model in models
        ]
        for name, text, value in _COUNTERS:
            counter = Family(name, "counter", text)
            for labels, statistics in rows:
                counter.add(labels, value(statistics))
            yield counter
        failures = Family("nv_inference_request_failure", "counter", "Requests that failed, by reason.")
        pending = Family("nv_inference_pending_request_count", "gauge", "Requests that wait for execution.")
        for labels, statistics in rows:
            for reason in REASONS:
                failures.add({**labels, "reason": reason}, statistics.failures[reason])
            pending.add(labels, statistics.pending)
        yield failures
        yield pending
        loads = Family("nv_model_load_duration_secs", "gauge", "Seconds that loading took.")
        for (name, version), seconds in self._load_seconds().items():
            loads.add(_labels(name, version) | tags.get((name, version), {}), seconds)
        yield loads
        yield from self._machine()

    def _machine(self) -> Iterator[Family]:
        total, used = memory_bytes()
        for name, text, value in (
            ("nv_cpu_utilization", "Share of CPU time in use, 0 to 1.", self._cpu.utilization()),
            ("nv_cpu_memory_total_bytes", "Memory of the machine.", total),
            ("nv_cpu_memory_used_bytes", "Memory in use.", used),
        ):
            family = Family(name, "gauge", text)
            family.add({}, value)
            yield family


def _labels(name: str, version: int) -> dict[str, str]:
    return {"model": name, "version": str(version)}
