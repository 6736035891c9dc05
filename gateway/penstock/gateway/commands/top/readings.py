"""Readings of a server's metrics, and what two of them say of the time between: rates, and quantiles of latencies.

The names of Penstock's metrics are tried first, then vLLM's, whose servers can be watched in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_WINDOW = 10.0
"""Seconds that rates and quantiles are about."""
_INFINITE = "+Inf"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reading:
    """A page of metrics, at a time."""

    at: float
    values: Mapping[str, Mapping[Labels, float]]
    """Of each series, by name and labels."""

    @classmethod
    def parsed(cls, page: str, at: float) -> Reading:
        """Raises ValueError for what is no page of metrics."""
        values: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return cls(at, values)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all series that have these labels; None: there are none."""
        matching = [value for key, value in self.values.get(name, {}).items() if labels.items() <= dict(key).items()]
        return sum(matching) if matching else None

    def label_values(self, name: str, label: str) -> list[str]:
        return sorted({dict(key).get(label, "") for key in self.values.get(name, {})} - {""})

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound, over all series that have these labels."""
        counts: dict[float, float] = {}
        for key, value in self.values.get(f"{name}_bucket", {}).items():
            series = dict(key)
            if labels.items() <= series.items():
                bound = float(series.get("le", _INFINITE))
                counts[bound] = counts.get(bound, 0.0) + value
        return counts


@dataclass(frozen=True)
class Dialect:
    """The names that one kind of server has for the same things."""

    model_label: str
    running: str
    waiting: str
    cache_share: str
    prompt_tokens: str
    output_tokens: str
    prefix_queries: str
    prefix_hits: str
    preemptions: str
    ttft: str
    itl: str


PENSTOCK = Dialect(
    model_label="model",
    running="penstock_requests_running",
    waiting="penstock_requests_waiting",
    cache_share="penstock_kv_cache_usage_ratio",
    prompt_tokens="penstock_prompt_tokens_total",
    output_tokens="penstock_generation_tokens_total",
    prefix_queries="penstock_prefix_cache_queries_total",
    prefix_hits="penstock_prefix_cache_hits_total",
    preemptions="penstock_preemptions_total",
    ttft="penstock_time_to_first_token_seconds",
    itl="penstock_inter_token_latency_seconds",
)
VLLM = Dialect(
    model_label="model_name",
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    cache_share="vllm:kv_cache_usage_perc",
    prompt_tokens="vllm:prompt_tokens_total",
    output_tokens="vllm:generation_tokens_total",
    prefix_queries="vllm:prefix_cache_queries_total",
    prefix_hits="vllm:prefix_cache_hits_total",
    preemptions="vllm:num_preemptions_total",
    ttft="vllm:time_to_first_token_seconds",
    itl="vllm:inter_token_latency_seconds",
)


@dataclass(frozen=True)
class ModelLine:
    """A language model: figures of now, and rates of the last seconds. None: the server does not have that figure, or
    there was nothing to measure."""

    name: str
    ready: bool
    running: int
    waiting: int
    cache_share: float | None
    prompt_rate: float
    """Tokens per second."""
    output_rate: float
    hit_share: float | None
    """Of the prompt tokens that were looked up in the prefix cache."""
    preemptions: int
    """In the window."""
    ttft: tuple[float, float] | None
    """Median and 95th percentile, in seconds."""
    itl: tuple[float, float] | None


@dataclass(frozen=True)
class TenantLine:
    name: str
    waiting: int
    request_rate: float
    token_rate: float
    """Prompts and answers."""


@dataclass
class Readings:
    """The readings of the last seconds."""

    _kept: deque[Reading] = field(default_factory=deque)

    def add(self, reading: Reading) -> None:
        """One whose counters have fallen is of another start of the server: older ones say nothing about it."""
        if self._kept and _has_restarted(self._kept[-1], reading):
            self._kept.clear()
        self._kept.append(reading)
        while len(self._kept) > 2 and reading.at - self._kept[1].at >= _WINDOW:
            self._kept.popleft()

    @property
    def seconds(self) -> float:
        """That the rates are about; 0 with a single reading."""
        return self._kept[-1].at - self._kept[0].at if self._kept else 0.0

    def models(self) -> list[ModelLine]:
        if not self._kept:
            return []
        names = self._kept[-1].values
        dialect = VLLM if VLLM.running in names and PENSTOCK.running not in names else PENSTOCK
        return [
            self._model(dialect, name) for name in self._kept[-1].label_values(dialect.running, dialect.model_label)
        ]

    def tenants(self) -> list[TenantLine]:
        """The busiest first."""
        if not self._kept:
            return []
        names = self._kept[-1].label_values("penstock_tenant_requests_total", "tenant")
        lines = [self._tenant(name) for name in names]
        return sorted(lines, key=lambda line: (-line.token_rate, -line.request_rate, line.name))

    def _model(self, dialect: Dialect, name: str) -> ModelLine:
        now, labels = self._kept[-1], {dialect.model_label: name}
        looked_up, hits = self._grown(dialect.prefix_queries, labels), self._grown(dialect.prefix_hits, labels)
        return ModelLine(
            name=name,
            ready=now.total("penstock_engine_ready", **labels) != 0.0,
            running=int(now.total(dialect.running, **labels) or 0),
            waiting=int(now.total(dialect.waiting, **labels) or 0),
            cache_share=now.total(dialect.cache_share, **labels),
            prompt_rate=self._rate(dialect.prompt_tokens, labels),
            output_rate=self._rate(dialect.output_tokens, labels),
            hit_share=hits / looked_up if looked_up else None,
            preemptions=int(self._grown(dialect.preemptions, labels)),
            ttft=self._quantiles(dialect.ttft, labels),
            itl=self._quantiles(dialect.itl, labels),
        )

    def _tenant(self, name: str) -> TenantLine:
        labels = {"tenant": name}
        tokens = ("penstock_tenant_prompt_tokens_total", "penstock_tenant_completion_tokens_total")
        return TenantLine(
            name=name,
            waiting=int(self._kept[-1].total("penstock_tenant_requests_waiting", **labels) or 0),
            request_rate=self._rate("penstock_tenant_requests_total", labels),
            token_rate=sum(self._rate(series, labels) for series in tokens),
        )

    def _grown(self, name: str, labels: Mapping[str, str]) -> float:
        before, now = (reading.total(name, **labels) or 0.0 for reading in (self._kept[0], self._kept[-1]))
        return max(0.0, now - before)

    def _rate(self, name: str, labels: Mapping[str, str]) -> float:
        return self._grown(name, labels) / self.seconds if self.seconds else 0.0

    def _quantiles(self, name: str, labels: Mapping[str, str]) -> tuple[float, float] | None:
        before, now = (reading.buckets(name, **labels) for reading in (self._kept[0], self._kept[-1]))
        counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(now.items())}
        if not counts or max(counts.values()) <= 0:
            return None
        return quantile(counts, 0.5), quantile(counts, 0.95)


def quantile(counts: Mapping[float, float], share: float) -> float:
    """Of a histogram with cumulative counts by upper bound, ascending, as Prometheus estimates it: values are taken to
    be spread evenly in each bucket. What is above the last finite bound counts as that bound."""
    wanted_rank = share * max(counts.values())
    low, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted_rank and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted_rank - below) / (count - below)
        low, below = bound, count
    return low


def _has_restarted(before: Reading, now: Reading) -> bool:
    return any(
        (now.total(name) or 0.0) < (before.total(name) or 0.0)
        for name in (PENSTOCK.output_tokens, PENSTOCK.prompt_tokens, VLLM.output_tokens)
        if name in now.values
    )


@dataclass(frozen=True)
class RequestLine:
    """A request in flight, as /debug/requests shows it."""

    id: str
    tenant: str
    model: str
    stage: str
    seconds: float
    tokens: int

    @classmethod
    def all_of(cls, shown: Mapping[str, Any]) -> Iterator[RequestLine]:
        """The oldest first."""
        for request in shown.get("requests", ()):
            yield cls(
                id=str(request.get("id", "")),
                tenant=str(request.get("tenant", "")),
                model=str(request.get("target") or request.get("model") or ""),
                stage=str(request.get("stage", "")),
                seconds=float(request.get("seconds") or 0.0),
                tokens=int(request.get("completion_tokens") or 0),
            )
