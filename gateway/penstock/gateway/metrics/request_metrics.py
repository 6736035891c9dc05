"""Prometheus families of the fronts: HTTP requests and RPCs, what each tenant uses, intake, connections."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.intake import BodyIntake, WorkPools
from penstock.gateway.requests.record import Outcome, Stage

logger = logging.getLogger(__name__)


class Histogram:
    """A Prometheus histogram that takes many equal observations at the price of one. Buckets by upper bound; `observe`
    is on the token path: a bisection and three additions, no lock."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def samples(self, labels: dict[str, str]) -> Iterator[HistogramMetricFamily]:
        """The family with this histogram as its only member."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=list(labels))
        bounds = [*map(str, self._bounds), "+Inf"]
        cumulative = accumulate(self._counts)
        family.add_metric(list(labels.values()), list(zip(bounds, cumulative, strict=True)), self._sum)
        yield family


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
MAX_TENANTS = 50
"""That have series of their own; those that come later share one."""
OTHER, ANONYMOUS = "other", "anonymous"
_WITHOUT_TOKEN = (Stage.ENGINE, Stage.UPSTREAM)


class _Route:
    """What has ended on one route."""

    __slots__ = ("bytes_in", "bytes_out", "ended", "seconds")

    def __init__(self) -> None:
        self.ended: dict[tuple[str, str, str], int] = {}
        """By method, status and outcome."""
        self.bytes_in = 0
        self.bytes_out = 0
        text = "From the first byte of a request to the end of its answer."
        self.seconds = Histogram("penstock_front_request_seconds", text, _SECONDS)


@dataclass(slots=True)
class _Tenant:
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class RequestMetrics:
    """A source of metrics, told of each request that has ended. Labels are the server's words, never a client's."""

    def __init__(self) -> None:
        self.in_flight: Callable[[], Iterable[RequestContext]] = tuple
        """Gives the requests that have not ended."""
        self._routes: dict[tuple[str, str], _Route] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._versions = Counter[str]()
        """Of HTTP."""
        self._ignored = Counter[str]()
        """Requests by a field that was not used as it was sent."""

    def __call__(self, context: RequestContext) -> None:
        record = context.record
        key = (record.protocol, record.route)
        if record.http_version:
            self._versions[record.http_version] += 1
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = _Route()
        end = (record.method, record.status, record.outcome)
        route.ended[end] = route.ended.get(end, 0) + 1
        route.bytes_in += record.bytes_in
        route.bytes_out += record.bytes_out
        route.seconds.observe(time.monotonic() - context.arrival)
        for field in record.ignored:
            self._count_ignored(field, record.route)
        name = self._class(context.tenant)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        tenant.requests += 1
        if record.usage is not None:
            tenant.prompt_tokens += record.usage.prompt_tokens
            tenant.completion_tokens += record.usage.completion_tokens

    def _count_ignored(self, field: str, route: str) -> None:
        """Logged once: fields are noted in the schema's own words (`RequestContext.ignore`), so there are not many."""
        if field not in self._ignored:
            logger.info(
                "requests to %s have the field %s, which is not used as they send it: their answers name it in "
                "x-penstock-ignored, metrics count it, and the log does not mention it again (--strict-requests "
                "refuses such requests)",
                route,
                field,
            )
        self._ignored[field] += 1

    def _class(self, tenant: str) -> str:
        if not tenant:
            return ANONYMOUS
        return tenant if tenant in self._tenants or len(self._tenants) < MAX_TENANTS else OTHER

    def collect(self) -> Iterator[Metric]:
        names = ["protocol", "route"]
        ended = CounterMetricFamily(
            "penstock_front_requests", "Requests that have ended.", labels=[*names, "method", "status", "outcome"]
        )
        text = "Bytes of bodies and messages that were read."
        bytes_in = CounterMetricFamily("penstock_front_request_bytes", text, labels=names)
        bytes_out = CounterMetricFamily("penstock_front_response_bytes", "Bytes that were answered.", labels=names)
        for key, route in self._routes.items():
            for (method, status, outcome), count in route.ended.items():
                ended.add_metric([*key, method, status or "none", outcome], count)
            bytes_in.add_metric(key, route.bytes_in)
            bytes_out.add_metric(key, route.bytes_out)
            yield from route.seconds.samples(dict(zip(names, key, strict=True)))
        yield from (ended, bytes_in, bytes_out)
        text = "HTTP requests that have ended, by the version of HTTP."
        versions = CounterMetricFamily("penstock_front_http_requests", text, labels=["version"])
        for version, count in self._versions.items():
            versions.add_metric([version], count)
        yield versions
        text = "Requests that have ended, by a field of theirs that was not used as it was sent."
        ignored = CounterMetricFamily("penstock_front_ignored_fields", text, labels=["field"])
        for field, count in self._ignored.items():
            ignored.add_metric([field], count)
        yield ignored
        yield from self._collect_in_flight()
        yield from self._collect_tenants()

    def _collect_in_flight(self) -> Iterator[Metric]:
        in_flight = Counter[str]()
        waiting = Counter[str]()
        for context in self.in_flight():
            in_flight[context.record.protocol] += 1
            waiting[self._class(context.tenant)] += context.record.stage in _WITHOUT_TOKEN
        requests = GaugeMetricFamily("penstock_front_requests_in_flight", "Requests in flight.", labels=["protocol"])
        for protocol in ("http", "grpc"):
            requests.add_metric([protocol], in_flight[protocol])
        yield requests
        text = "Requests of a tenant that have no token yet: queued, or their prompt is computed, here or elsewhere."
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
                family.add_metric([tenant], getattr(used, name))
            yield family


_WINDOW = 10
"""Seconds over which ends are counted."""
_FAILURES = frozenset({Outcome.SERVER_ERROR, Outcome.REFUSED, Outcome.DEADLINE})
"""What is the server's fault, or its load's."""


class EndedRequests:
    """How many inferences have ended in each of the last seconds. A hook of the journal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: deque[tuple[int, list[int]]] = deque()
        """(second, [ended, failed]), the newest last."""

    def __call__(self, context: RequestContext) -> None:
        if not context.infers:
            return
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0, 0]))
            self._forget(second)
        counts = self._seconds[-1][1]
        counts[0] += 1
        counts[1] += context.record.outcome in _FAILURES

    def per_second(self) -> tuple[float, float]:
        """(ended, failed). The second that has just begun counts with the part of it that is over."""
        now = self._clock()
        self._forget(int(now))
        span = min(now - self._began, now - int(now) + _WINDOW - 1)
        ended, failed = (sum(counts[which] for _, counts in self._seconds) for which in (0, 1))
        return (ended / span, failed / span) if span > 0 else (0.0, 0.0)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - _WINDOW:
            self._seconds.popleft()


class IntakeMetrics:
    """What is taken in and refused before any queue."""

    def __init__(self, intake: BodyIntake, pools: WorkPools) -> None:
        self._intake = intake
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        bodies, lag, pools = self._intake.bodies, self._intake.lag, (self._pools.text, self._pools.tensors)
        text = "How late the event loop runs what is due, of late."
        yield GaugeMetricFamily("penstock_event_loop_lag_seconds", text, value=lag.recent)
        text = "Bytes of request bodies in memory, without small ones over HTTP."
        yield GaugeMetricFamily("penstock_body_bytes", text, value=bodies.held)
        yield GaugeMetricFamily("penstock_body_bytes_limit", "How many there may be.", value=bodies.limit)
        unread = self._intake.unread
        text = "Bytes of answers over HTTP/2 and gRPC that wait for their clients to read them."
        yield GaugeMetricFamily("penstock_unread_answer_bytes", text, value=unread.held)
        text = "Connections closed because all clients together had not read too much."
        yield CounterMetricFamily("penstock_unread_closed", text, value=unread.closed)
        text = "Work that waits or runs in threads: characters of text, bytes of tensor data."
        work = GaugeMetricFamily("penstock_work", text, labels=["kind"])
        for pool in pools:
            work.add_metric([pool.kind], pool.cost)
        yield work
        text = "Requests refused before any queue, by what was full."
        refused = CounterMetricFamily("penstock_front_refused", text, labels=["full"])
        for name, count in (("bodies", bodies.refused), ("event loop", lag.refused)):
            refused.add_metric([name], count)
        for pool in pools:
            refused.add_metric([pool.kind], pool.refused)
        yield refused


class HttpPortMetrics:
    """What is open on the HTTP port."""

    def __init__(self, connections: Callable[[], Mapping[str, int]]) -> None:
        """`connections` gives how many there are, by version."""
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        text = "Open connections of the HTTP port, by the version of HTTP."
        family = GaugeMetricFamily("penstock_http_connections", text, labels=["version"])
        for version, count in self._connections().items():
            family.add_metric([version], count)
        yield family
