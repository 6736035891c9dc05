"""Prometheus families of the fronts: HTTP requests, RPCs, and what each tenant uses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import Stage
from penstock.gateway.metrics.histogram import Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
MAX_TENANTS = 50
"""That have series of their own; those that come later share one."""
OTHER, ANONYMOUS = "other", "anonymous"


class RequestMetrics:
    """A source of metrics, told of each request that has ended. Labels are the server's words, never a client's."""

    def __init__(self) -> None:
        self.in_flight: Callable[[], Iterable[RequestContext]] = tuple
        """Gives the requests that have not ended."""
        self._ended: Counter[tuple[str, str, str, str, str]] = Counter()
        self._bytes_in: Counter[tuple[str, str]] = Counter()
        self._bytes_out: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._tenants: dict[str, Counter[str]] = {}

    def __call__(self, context: RequestContext) -> None:
        record = context.record
        route = (record.protocol, record.route)
        self._ended[(*route, record.method, record.status or "none", record.outcome.value)] += 1
        self._bytes_in[route] += record.bytes_in
        self._bytes_out[route] += record.bytes_out
        histogram = self._seconds.get(route)
        if histogram is None:
            text = "From the first byte of a request to the end of its answer."
            histogram = self._seconds[route] = Histogram("penstock_front_request_seconds", text, _SECONDS)
        histogram.observe(time.monotonic() - context.arrival)
        used = self._of_tenant(context.tenant)
        used["requests"] += 1
        used[record.outcome.value] += 1
        if record.usage is not None:
            used["prompt_tokens"] += record.usage.prompt_tokens
            used["completion_tokens"] += record.usage.completion_tokens

    def _class(self, tenant: str) -> str:
        if not tenant:
            return ANONYMOUS
        return tenant if tenant in self._tenants or len(self._tenants) < MAX_TENANTS else OTHER

    def _of_tenant(self, tenant: str) -> Counter[str]:
        return self._tenants.setdefault(self._class(tenant), Counter())

    def collect(self) -> Iterator[Metric]:
        names = ["protocol", "route"]
        ended = CounterMetricFamily(
            "penstock_front_requests", "Requests that have ended.", labels=[*names, "method", "status", "outcome"]
        )
        for labels, count in self._ended.items():
            ended.add_metric(labels, count)
        yield ended
        for name, text, counts in (
            ("request_bytes", "Bytes of bodies and messages that were read.", self._bytes_in),
            ("response_bytes", "Bytes that were answered.", self._bytes_out),
        ):
            family = CounterMetricFamily(f"penstock_front_{name}", text, labels=names)
            for route, count in counts.items():
                family.add_metric(route, count)
            yield family
        for route, histogram in self._seconds.items():
            yield from histogram.samples(dict(zip(names, route, strict=True)))
        yield from self._collect_in_flight()
        yield from self._collect_tenants()

    def _collect_in_flight(self) -> Iterator[Metric]:
        in_flight = Counter[str]()
        waiting = Counter[str]()
        for context in self.in_flight():
            in_flight[context.record.protocol] += 1
            waiting[self._class(context.tenant)] += context.record.stage is Stage.ENGINE
        requests = GaugeMetricFamily("penstock_front_requests_in_flight", "Requests in flight.", labels=["protocol"])
        for protocol in ("http", "grpc"):
            requests.add_metric([protocol], in_flight[protocol])
        yield requests
        text = "Requests of a tenant that have no token yet: queued in the engine, or their prompt is computed."
        tenants = GaugeMetricFamily("penstock_tenant_requests_waiting", text, labels=["tenant"])
        for tenant in {*self._tenants, *waiting}:
            tenants.add_metric([tenant], waiting[tenant])
        yield tenants

    def _collect_tenants(self) -> Iterator[Metric]:
        for name, text in (
            ("requests", "Requests of a tenant that have ended."),
            ("prompt_tokens", "Prompt tokens of a tenant's requests that have ended."),
            ("completion_tokens", "Tokens generated for a tenant's requests that have ended."),
        ):
            family = CounterMetricFamily(f"penstock_tenant_{name}", text, labels=["tenant"])
            for tenant, used in self._tenants.items():
                family.add_metric([tenant], used[name])
            yield family
