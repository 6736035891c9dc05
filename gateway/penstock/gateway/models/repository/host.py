"""The server as its models see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from penstock.classic.base import InferModel, Metric, reports_ready
from penstock.classic.messages import InferRequest
from penstock.engines.errors import NotReadyError, PenstockError
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.models.on_demand.on_demand import no_use


class MetricFamilies(Protocol):
    """`Host.metric_family` and `Host.metric`: whatever keeps the server's metrics."""

    def family(self, kind: str, name: str, description: str) -> None: ...

    def metric(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float] = ()
    ) -> Metric: ...


UseModel = Callable[[str, float | None], Awaitable[Callable[[], None]]]
"""`Catalogue.use_for_model`."""


async def _nothing_is_loaded(name: str, deadline: float | None) -> Callable[[], None]:
    return no_use


class RepositoryHost:
    """The Host of models that live in a ModelStore."""

    def __init__(
        self, store: ModelStore, metrics: MetricFamilies | None, use_model: UseModel = _nothing_is_loaded
    ) -> None:
        self._store = store
        self._public = store
        self.is_public: Callable[[str], bool] = lambda name: False
        """Whether a name has traffic rules."""
        self._metrics = metrics
        self._use_model = use_model

    def route(self, public: ModelStore, is_public: Callable[[str], bool]) -> None:
        """From now on requests of models find what clients find in `public`: also names that several models serve."""
        self._public, self.is_public = public, is_public

    def model(self, name: str, version: int = -1, request: InferRequest | None = None) -> InferModel:
        version_text = "" if version == -1 else str(version)
        model = (
            self._store.model(name, version_text)
            if request is None
            else self._public.model(name, version_text, request)
        )
        if not model.ready:
            raise NotReadyError(f"model '{name}' is not ready")
        return model

    def model_ready(self, name: str, version: int = -1) -> bool:
        try:
            return reports_ready(self._public.model(name, "" if version == -1 else str(version)))
        except PenstockError:
            return False

    async def use_model(self, name: str, deadline: float | None) -> Callable[[], None]:
        return await self._use_model(name, deadline)

    async def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        await self._store.load(name, config=config, files=files or None)

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        await self._store.unload(name, unload_dependents=unload_dependents)

    def metric_family(self, kind: str, name: str, description: str) -> None:
        self._kept_metrics.family(kind, name, description)

    def metric(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float] = ()
    ) -> Metric:
        return self._kept_metrics.metric(kind, name, description, labels, buckets)

    @property
    def _kept_metrics(self) -> MetricFamilies:
        if self._metrics is None:
            raise ValueError("this server keeps no metrics of models")
        return self._metrics
