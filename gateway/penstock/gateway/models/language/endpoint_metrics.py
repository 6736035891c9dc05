"""Metrics that endpoint pickers read: those of the Gateway API inference extension and of llm-d.

What they read, and from which labels: https://gateway-api-inference-extension.sigs.k8s.io (model server protocol).
Their defaults are vLLM's names, which the server gives by option (vllm/v1/metrics/loggers.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from penstock.gateway.models.language.adapters import AdapterSet
from penstock.gateway.models.language.models import LoadedModel


class EndpointMetrics:
    """A source of metrics over all language models that are loaded."""

    def __init__(self, models: Callable[[], Sequence[tuple[str, LoadedModel]]], *, vllm_names: bool = False) -> None:
        """`models`: (first name, model) of each."""
        self._models = models
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        for name, model in self._models():
            text = "Tokens of a block of the KV cache."
            yield _gauge("penstock_kv_cache_block_size", text, {"model": name}, model.engine.info.block_size)
            if model.adapters.max_loaded:
                yield _lora("penstock_lora_info", {"model": name}, model.adapters)
            if self._vllm_names:
                yield from _as_vllm(name, model)


def _as_vllm(name: str, model: LoadedModel) -> Iterator[Metric]:
    stats, labels = model.engine.stats, {"model_name": name, "engine": "0"}
    text = "Requests in the running batch."
    yield _gauge("vllm:num_requests_running", text, labels, stats.num_running)
    yield _gauge("vllm:num_requests_waiting", "Requests in the queue.", labels, stats.num_waiting)
    usage = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.", labels, usage)
    config = {"block_size": str(model.engine.info.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    yield _gauge("vllm:cache_config_info", "The KV cache's size; always 1.", labels | config, 1)
    if model.adapters.max_loaded:
        yield _lora("vllm:lora_requests_info", {"model_name": name}, model.adapters)


def _lora(name: str, labels: Mapping[str, str], adapters: AdapterSet) -> GaugeMetricFamily:
    """An adapter has its name only once it is loaded, so all that have one are ready, and none is waited for."""
    known = {
        "max_lora": str(adapters.max_loaded),
        "running_lora_adapters": ",".join(adapter.name for adapter in adapters),
        "waiting_lora_adapters": "",
    }
    text = "LoRA adapters that are loaded, as labels; the value is the time in Unix seconds."
    return _gauge(name, text, {**labels, **known}, time.time())


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=list(labels))
    gauge.add_metric(list(labels.values()), value)
    return gauge
