"""All models of other servers: made from their settings, known by name, watched, and let go; and their metrics."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engines.errors import AlreadyExistsError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.upstream_settings import Api, UpstreamSettings
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.models import NameHolder
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.upstream.answer_reading import HeldAnswers
from penstock.gateway.models.upstream.fleet import Fleet
from penstock.gateway.models.upstream.model import Surroundings, UpstreamModel
from penstock.gateway.models.upstream.prompt_tokens import PromptEncoder
from penstock.gateway.models.upstream.request_writing import ApiKey, RequestWriter
from penstock.gateway.models.upstream.server import UpstreamServer, probe

logger = logging.getLogger("penstock")


class _Watched(NamedTuple):
    model: UpstreamModel
    task: asyncio.Task[None] | None
    """Asks its servers whether they are there."""


class Upstreams:
    """Lives on the event loop."""

    def __init__(
        self,
        models: Catalogue,
        *,
        version: str,
        heartbeat_s: float,
        request_timeout: float | None,
        answer_memory: int,
    ) -> None:
        """`answer_memory`: bytes of all answers that may be in memory until more of them has come."""
        self._models = models
        self._user_agent = f"penstock/{version}"
        self._surroundings = Surroundings(
            find_fallback=self._find,
            is_own=self._is_own,
            held=HeldAnswers(answer_memory),
            heartbeat_s=heartbeat_s,
            request_timeout=request_timeout,
        )
        self._watched: dict[str, list[_Watched]] = {}
        """The newest last: the one that it replaces stays until it is removed, as the load may still fail."""
        self.metrics = UpstreamMetrics(lambda: [versions[-1].model for versions in self._watched.values()])

    def build(self, settings: UpstreamSettings) -> UpstreamModel:
        """Reads the files that the settings name. Raises ConfigError."""
        key = ApiKey(settings.api_key_file, settings.api_key_env)
        tls = _tls(settings)
        fleet = Fleet(settings, [UpstreamServer(settings, url, tls) for url in settings.urls])
        writer = RequestWriter(settings, key, self._user_agent)
        encoder = None if settings.tokenizer is None else PromptEncoder(settings.tokenizer)
        return UpstreamModel(settings, fleet, writer, self._surroundings, encoder)

    def add(self, model: UpstreamModel) -> None:
        """From now on its name is known; one of this kind that had it is replaced. Raises AlreadyExistsError."""
        self._models.add(model)
        watching = asyncio.create_task(_watch(model)) if model.settings.health else None
        model.fleet.start()
        self._watched.setdefault(model.name, []).append(_Watched(model, watching))

    async def remove(self, model: UpstreamModel) -> None:
        """Its name is unknown, unless another model has it; returns when what runs has ended."""
        known = self._watched.get(model.name, [])
        for watched in [watched for watched in known if watched.model is model]:
            known.remove(watched)
            if watched.task is not None:
                watched.task.cancel()
            if known:
                self._models.add(known[-1].model)
            else:
                del self._watched[model.name]
                self._models.remove(model)
        await model.calls.wait_idle()
        model.fleet.stop()

    def stop(self) -> None:
        """At the server's end: closes what is idle."""
        for model, task in (watched for known in self._watched.values() for watched in known):
            if task is not None:
                task.cancel()
            model.fleet.stop()

    def start(self, settings: Iterable[UpstreamSettings]) -> None:
        """Raises ConfigError."""
        for upstream in settings:
            try:
                self.add(self.build(upstream))
            except AlreadyExistsError as error:
                raise ConfigError(f"upstream: {error.message}") from None
            logger.info("ready: %s, which other servers have: %s", upstream.name, ", ".join(upstream.urls))

    def _find(self, name: str) -> UpstreamModel | None:
        versions = self._watched.get(name)
        return None if versions is None else versions[-1].model

    def _is_own(self, name: str, api: Api) -> bool:
        model, pools = self._models.model(name), api == "embeddings"
        if model is None:
            return not pools and name in self._models
        return isinstance(model, PoolingModel if pools else NameHolder)


async def _watch(model: UpstreamModel) -> None:
    settings = model.settings
    while True:
        await asyncio.gather(*(_look(model, server) for server in model.fleet.servers))
        await asyncio.sleep(settings.health_interval)


async def _look(model: UpstreamModel, server: UpstreamServer) -> None:
    settings = model.settings
    seconds = min(settings.health_interval, settings.connect_timeout + settings.idle_timeout)
    there = await probe(server, settings.health, model.probe_headers(), seconds)
    server.health.probed(there=there)


def _tls(settings: UpstreamSettings) -> ssl.SSLContext | None:
    """None where no url is https. Raises ConfigError."""
    if not any(text.startswith("https") for text in settings.urls):
        if settings.ca_file is not None:
            raise ConfigError(f"upstream {settings.name!r}: ca_file needs an https url")
        return None
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"upstream {settings.name!r}: ca_file: {settings.ca_file}: {error}") from None


_LABELS = ["model", "server"]


class UpstreamMetrics:
    """A source of metrics."""

    def __init__(self, models: Callable[[], Iterable[UpstreamModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        yield from _servers(models)
        yield from _caches(models)
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


def _caches(models: Iterable[UpstreamModel]) -> Iterator[Metric]:
    text = (
        "Tokens of prompts that a server was sent, by who says that it has them cached: its KV events (events), what "
    )
    text += "it was sent before (sent), or nothing (no)."
    routed = CounterMetricFamily("penstock_upstream_routed_tokens", text, labels=[*_LABELS, "cached"])
    text = "1 while a server's KV events are followed, 0 while what it has cached is not known."
    live = GaugeMetricFamily("penstock_upstream_kv_events_live", text, labels=_LABELS)
    blocks = GaugeMetricFamily("penstock_upstream_kv_blocks", "Blocks that a server says it has.", labels=_LABELS)
    text = "Times that what a server has cached was forgotten, since its events were lost or cannot be read."
    losses = CounterMetricFamily("penstock_upstream_kv_events_losses", text, labels=_LABELS)
    for model in models:
        for number, server in enumerate(model.fleet.servers):
            labels = [model.name, server.label]
            for cached, count in server.routed_tokens.items():
                routed.add_metric([*labels, cached], count)
            followed = model.fleet.followed.get(number)
            if followed is not None:
                live.add_metric(labels, followed.live)
                blocks.add_metric(labels, followed.num_blocks)
                losses.add_metric(labels, followed.losses)
    yield from (routed, live, blocks, losses)


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
