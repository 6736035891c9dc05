"""Metrics of the fronts and tenants."""

from __future__ import annotations

from prometheus_client.core import Metric

from penstock.gateway.metrics.request_metrics import ANONYMOUS, MAX_TENANTS, OTHER, RequestMetrics
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.record import Stage


def context(tenant: str = "", **fields: object) -> RequestContext:
    made = RequestContext(principal=Principal(tenant=tenant))
    for name, value in fields.items():
        setattr(made.record, name, value)
    return made


def samples(metrics: RequestMetrics, name: str) -> dict[tuple[str, ...], float]:
    families: list[Metric] = list(metrics.collect())
    return {
        tuple(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_requests_are_counted_by_route_and_end() -> None:
    metrics = RequestMetrics()
    for status in ("200", "200", "503"):
        metrics(context(method="POST", route="/v1/completions", status=status, bytes_in=10, bytes_out=100))
    metrics(context(protocol="grpc", route="/X/Y"))
    ended = samples(metrics, "penstock_front_requests_total")
    assert ended == {
        ("http", "/v1/completions", "POST", "200", "ok"): 2,
        ("http", "/v1/completions", "POST", "503", "ok"): 1,
        ("grpc", "/X/Y", "", "none", "ok"): 1,
    }
    assert samples(metrics, "penstock_front_request_bytes_total")["http", "/v1/completions"] == 30
    assert samples(metrics, "penstock_front_response_bytes_total")["http", "/v1/completions"] == 300
    assert samples(metrics, "penstock_front_request_seconds_count") == {
        ("http", "/v1/completions"): 3,
        ("grpc", "/X/Y"): 1,
    }


def test_tenants_have_series_of_their_own_up_to_a_number() -> None:
    metrics = RequestMetrics()
    metrics(context())
    for number in range(MAX_TENANTS + 20):
        metrics(context(f"t{number}", usage=Usage(3, 4)))
    tokens = samples(metrics, "penstock_tenant_completion_tokens_total")
    assert len(tokens) == MAX_TENANTS + 1
    assert tokens["t0",] == 4
    assert tokens[ANONYMOUS,] == 0
    assert tokens[OTHER,] == 4 * (MAX_TENANTS + 20 - (MAX_TENANTS - 1))


def test_what_is_in_flight_is_counted_when_asked_for() -> None:
    metrics = RequestMetrics()
    queued, decoding = context("a", stage=Stage.ENGINE), context("a", stage=Stage.DECODING)
    metrics.in_flight = lambda: (queued, decoding, context(protocol="grpc"))
    assert samples(metrics, "penstock_front_requests_in_flight") == {("http",): 2, ("grpc",): 1}
    assert samples(metrics, "penstock_tenant_requests_waiting") == {("a",): 1, (ANONYMOUS,): 0}
