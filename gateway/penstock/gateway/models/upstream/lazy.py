"""The models of other servers that a server has. Their code is loaded with the first of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.gateway.configuration.config import Config
from penstock.gateway.metrics.registry import Source
from penstock.gateway.models.catalogue import Catalogue

if TYPE_CHECKING:
    from penstock.gateway.models.upstream.kserve_model import UpstreamLoader
    from penstock.gateway.models.upstream.service import Upstreams

UPSTREAM_BACKEND = "openai"
"""Of models of a repository that another server has."""


class LazyUpstreams:
    def __init__(self, config: Config, models: Catalogue, version: str) -> None:
        self._models = models
        self._config = config
        self._version = version
        self._upstreams: Upstreams | None = None

    @property
    def upstreams(self) -> Upstreams:
        if self._upstreams is None:
            from penstock.gateway.models.upstream.service import Upstreams

            self._upstreams = Upstreams(
                self._models,
                version=self._version,
                heartbeat_s=self._config.server.heartbeat_s,
                request_timeout=self._config.models.scheduling.request_timeout or None,
                answer_memory=self._config.server.body_memory,
            )
        return self._upstreams

    def loader(self) -> UpstreamLoader:
        """For the models of repositories."""
        from penstock.gateway.models.upstream.kserve_model import UpstreamLoader

        return UpstreamLoader(lambda: self.upstreams)

    def start(self) -> None:
        """Those of --upstream. Raises ConfigError."""
        if self._config.upstream.upstream:
            self.upstreams.start(self._config.upstream.upstream)

    def metrics(self) -> Iterable[Source]:
        return () if self._upstreams is None else (self._upstreams.metrics,)

    def stop(self) -> None:
        if self._upstreams is not None:
            self._upstreams.stop()
