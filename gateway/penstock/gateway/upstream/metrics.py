"""Prometheus families of models that other servers have. Labels are names and addresses of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.gateway.upstream.model import UpstreamModel

_LABELS = ["model", "server"]


class UpstreamMetrics:
    """A source of metrics."""

    def __init__(self, models: Callable[[], Iterable[UpstreamModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        yield from _servers(models)
        yield from _requests(models)


def _servers(models: Iterable[UpstreamModel]) -> Iterator[Metric]:
    text = "1 while a server gets requests as usual, 0 while it is ejected, on trial or not found."
    healthy = GaugeMetricFamily("penstock_upstream_healthy", text, labels=_LABELS)
    in_flight = GaugeMetricFamily("penstock_upstream_in_flight", "Requests that a server has now.", labels=_LABELS)
    text = "Requests that a server was asked, by the status of its answer or what went wrong."
    requests = CounterMetricFamily("penstock_upstream_requests", text, labels=[*_LABELS, "status"])
    text = "Times that a server was left out, after failures or missed probes."
    ejections = CounterMetricFamily("penstock_upstream_ejections", text, labels=_LABELS)
    for model in models:
        for server in model.fleet.servers:
            labels = [model.name, server.label]
            healthy.add_metric(labels, server.health.healthy)
            in_flight.add_metric(labels, server.in_flight)
            ejections.add_metric(labels, server.health.ejections)
            for status, count in server.ended.items():
                requests.add_metric([*labels, status], count)
            yield from server.first_byte.samples({"model": model.name, "server": server.label})
    yield from (healthy, in_flight, requests, ejections)


def _requests(models: Iterable[UpstreamModel]) -> Iterator[Metric]:
    retries = CounterMetricFamily("penstock_upstream_retries", "Requests tried again.", labels=["model"])
    text = "Requests for which a second server was asked because the first was slow."
    hedges = CounterMetricFamily("penstock_upstream_hedges", text, labels=["model"])
    text = "Tokens of requests and answers, as the other servers count them."
    tokens = CounterMetricFamily("penstock_upstream_tokens", text, labels=["model", "kind"])
    text = "Requests that another model was to answer instead."
    fallbacks = CounterMetricFamily("penstock_upstream_fallbacks", text, labels=["model", "to"])
    for model in models:
        retries.add_metric([model.name], model.fleet.retries)
        hedges.add_metric([model.name], model.fleet.hedges)
        for kind in ("prompt", "completion"):
            tokens.add_metric([model.name, kind], model.tokens[kind])
        for name, count in model.fell_back.items():
            fallbacks.add_metric([model.name, name], count)
    yield from (retries, hedges, tokens, fallbacks)
