"""Reading a server's Prometheus page (text format 0.0.4, and OpenMetrics where it is the same)."""

from __future__ import annotations

import re

import msgspec

GAUGES = (
    "penstock_requests_running",
    "penstock_requests_waiting",
    "penstock_tokens_waiting",
    "penstock_kv_cache_usage_ratio",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "llamacpp:kv_cache_usage_ratio",
    "nv_inference_pending_request_count",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_trt_llm_request_metrics",
    "nv_trt_llm_kv_cache_block_metrics",
)
"""How busy servers of different makes say they are: Penstock, vLLM, SGLang, llama.cpp, Triton and its TensorRT-LLM."""
_SHARES = ("_ratio", "_perc", "token_usage", "_utilization")
"""Gauges of which several are not added up."""
_TELLING = ("request_type", "kv_cache_block_type", "kv_cache_type", "general_type")
"""Labels that say which of several gauges of one name it is."""
_NOT_ITS_WORK = ("process_", "python_", "http_", "promhttp_", "go_")
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_TYPE = re.compile(r"^# TYPE ([a-zA-Z_:][\w:]*) (\w+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MODEL = ("model", "model_name")


class Page(msgspec.Struct):
    """What it said at one moment."""

    gauges: dict[str, float] = {}
    """The known ones. Of several with one name, those of the model in question; added up, or the highest of shares."""
    counters: dict[str, float] = {}
    """All of the server's, and the sums and counts of its histograms; added up over their labels."""


def is_page(text: str) -> bool:
    return _TYPE.search(text) is not None


def parse(text: str, model: str = "") -> Page:
    """`model`: whose figures are wanted, where the labels tell them apart."""
    kinds = dict(_TYPE.findall(text))
    lines = [
        (name, dict(_LABEL.findall(labels)), value)
        for name, labels, value in _LINE.findall(text)
        if not name.endswith("_bucket")
    ]
    known = {labels[key] for _, labels, _ in lines for key in _MODEL if key in labels}
    page = Page()
    for name, labels, written in lines:
        if model in known and any(labels.get(key, model) != model for key in _MODEL):
            continue
        try:
            value = float(written)
        except ValueError:
            continue
        if value != value or value in (float("inf"), float("-inf")):
            continue
        if name in GAUGES:
            _put(page.gauges, name, labels, value)
        elif _counts(name, kinds) and not name.startswith(_NOT_ITS_WORK):
            page.counters[name] = page.counters.get(name, 0.0) + value
    return page


def _put(gauges: dict[str, float], name: str, labels: dict[str, str], value: float) -> None:
    told = [labels[key] for key in _TELLING if key in labels]
    key = f"{name}.{'.'.join(told)}" if told else name
    if name.endswith(_SHARES):
        gauges[key] = max(gauges.get(key, 0.0), value)
    else:
        gauges[key] = gauges.get(key, 0.0) + value


def _counts(name: str, kinds: dict[str, str]) -> bool:
    if kinds.get(name) == "counter" or kinds.get(name.removesuffix("_total")) == "counter":
        return True
    family = name.removesuffix("_sum").removesuffix("_count")
    return family != name and kinds.get(family) in ("histogram", "summary")


def increases(before: Page, after: Page) -> dict[str, float]:
    """By how much counters have grown, of those that have. One that has fallen began again: then its value is what it
    has grown by."""
    grown = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    return {name: round(after.counters[name] if value < 0 else value, 6) for name, value in grown.items() if value}
