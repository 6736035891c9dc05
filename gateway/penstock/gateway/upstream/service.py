"""All models of other servers: made from their settings, known by name, watched, and let go."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from typing import NamedTuple

from penstock.engines.errors import AlreadyExistsError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.upstream_settings import Api, UpstreamSettings
from penstock.gateway.http.text_models import TextModels
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.upstream.api_key import ApiKey
from penstock.gateway.upstream.asking import Asking
from penstock.gateway.upstream.fleet import Fleet
from penstock.gateway.upstream.held_answers import HeldAnswers
from penstock.gateway.upstream.metrics import UpstreamMetrics
from penstock.gateway.upstream.model import UpstreamModel
from penstock.gateway.upstream.server import UpstreamServer, probe

logger = logging.getLogger("penstock")

_REFUSAL = (
    "The model `{name}` is another server's. It can be asked by chats of every API, /v1/completions and "
    "/v1/embeddings. Only that server could do this."
)


class _Watched(NamedTuple):
    model: UpstreamModel
    task: asyncio.Task[None] | None
    """Asks its servers whether they are there."""


class Upstreams:
    """Lives on the event loop."""

    def __init__(
        self,
        models: TextModels,
        dataplane: DataPlane,
        *,
        version: str,
        heartbeat_s: float,
        request_timeout: float | None,
        answer_memory: int,
    ) -> None:
        """`answer_memory`: bytes of all answers that may be in memory until more of them has come."""
        self._models = models
        self._dataplane = dataplane
        self._user_agent = f"penstock/{version}"
        self._heartbeat_s = heartbeat_s
        self._request_timeout = request_timeout
        self._held = HeldAnswers(answer_memory)
        self._watched: dict[str, list[_Watched]] = {}
        """The newest last: the one that it replaces stays until it is removed, as the load may still fail."""
        self.metrics = UpstreamMetrics(lambda: [each[-1].model for each in self._watched.values()])

    def build(self, settings: UpstreamSettings) -> UpstreamModel:
        """Reads the files that the settings name. Raises ConfigError."""
        key = ApiKey(settings.api_key_file, settings.api_key_env)
        tls = _tls(settings)
        fleet = Fleet(settings, [UpstreamServer(settings, url, tls) for url in settings.urls])
        return UpstreamModel(
            settings,
            fleet,
            Asking(settings, key, self._user_agent),
            self._find,
            self._is_own,
            self._held,
            heartbeat_s=self._heartbeat_s,
            request_timeout=self._request_timeout,
        )

    def add(self, model: UpstreamModel) -> None:
        """From now on its name is known; one of this kind that had it is replaced. Raises AlreadyExistsError."""
        if model.name not in self._watched:
            self._dataplane.models.reserve(model.name, _REFUSAL.format(name=model.name))
        watching = asyncio.create_task(_watch(model)) if model.settings.health else None
        self._watched.setdefault(model.name, []).append(_Watched(model, watching))
        self._models.by_name[model.name] = model

    async def remove(self, model: UpstreamModel) -> None:
        """Its name is unknown, unless another model has it; returns when what runs has ended."""
        known = self._watched.get(model.name, [])
        for each in [each for each in known if each.model is model]:
            known.remove(each)
            if each.task is not None:
                each.task.cancel()
            if known:
                self._models.by_name[model.name] = known[-1].model
            else:
                del self._watched[model.name], self._models.by_name[model.name]
                self._dataplane.models.release(model.name)
        await model.calls.wait_idle()
        for server in model.fleet.servers:
            server.pool.close()

    def stop(self) -> None:
        """At the server's end: closes what is idle."""
        for model, task in (each for known in self._watched.values() for each in known):
            if task is not None:
                task.cancel()
            for server in model.fleet.servers:
                server.pool.close()

    def start(self, settings: Iterable[UpstreamSettings]) -> None:
        """Raises ConfigError."""
        for each in settings:
            try:
                self.add(self.build(each))
            except AlreadyExistsError as error:
                raise ConfigError(f"upstream: {error.message}") from None
            logger.info("ready: %s, which other servers have: %s", each.name, ", ".join(each.urls))

    def _find(self, name: str) -> UpstreamModel | None:
        found = self._watched.get(name)
        return None if found is None else found[-1].model

    def _is_own(self, name: str, api: Api) -> bool:
        generates = api != "embeddings"
        return self._dataplane.models.knows(name) if generates else self._dataplane.models.is_reserved(name)


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
