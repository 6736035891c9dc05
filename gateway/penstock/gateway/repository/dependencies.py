"""Which ensembles are made of which models: those that serve, those that load, and those that lack a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.classic.caching.cached_model import uncached
from penstock.classic.ensemble.model import EnsembleModel
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.repository.models import Deployment

Names = frozenset[str]


class Dependencies:
    def __init__(self, serving: Callable[[str], Deployment | None]) -> None:
        self._serving = serving
        self._loading: dict[str, Names] = {}
        self._lacking: dict[str, Names] = {}
        self._live: set[EnsembleModel] = set()

    def begin(self, ensemble: str, models: Names) -> None:
        """It is being loaded until `end`. Raises InvalidRequestError, in Triton's words, when it would be made of
        itself."""
        self._loading[ensemble] = self._lacking[ensemble] = models
        path = self._path(ensemble, ensemble, set())
        if path:
            told = " -> ".join((ensemble, *path))
            raise InvalidRequestError(f"circular dependency between ensembles: {told}")

    def end(self, ensemble: str) -> None:
        """Whether it was loaded or not. What could not be loaded lacks a model, until `published` or `forget`."""
        self._loading.pop(ensemble, None)

    def published(self, name: str, deployment: Deployment) -> None:
        self._lacking.pop(name, None)
        self._live.update(_ensembles(deployment))

    def lost(self, ensemble: str, models: Names) -> None:
        """It served until one of its models was unloaded."""
        self._lacking[ensemble] = models

    def forget(self, ensemble: str) -> None:
        """Nobody waits for it any more."""
        self._lacking.pop(ensemble, None)

    def complete_with(self, name: str) -> list[str]:
        """The ensembles that can be loaded now that this model serves."""
        return [
            ensemble
            for ensemble, models in sorted(self._lacking.items())
            if name in models and ensemble not in self._loading and all(map(self._serving, models))
        ]

    async def settled(self, name: str) -> None:
        """Returns when no request to an ensemble that has begun with this model runs any more."""
        await asyncio.gather(*(each.settled() for each in self._live if name in each.composing))

    def stopped(self, deployment: Deployment) -> None:
        self._live.difference_update(_ensembles(deployment))

    def needed_by_loads(self) -> Names:
        """What ensembles that are being loaded are made of."""
        return Names().union(*self._loading.values())

    def _path(self, start: str, goal: str, seen: set[str]) -> list[str]:
        """From a model to another that it is made of, directly or not; empty if it is not."""
        for name in sorted(self._composing(start)):
            if name == goal:
                return [name]
            if name not in seen:
                seen.add(name)
                if rest := self._path(name, goal, seen):
                    return [name, *rest]
        return []

    def _composing(self, name: str) -> Names:
        return self._loading.get(name) or composing(self._serving(name))


def composing(deployment: Deployment | None) -> Names:
    """The models that any version of it is made of."""
    return Names().union(*(each.composing for each in _ensembles(deployment)))


def _ensembles(deployment: Deployment | None) -> Iterable[EnsembleModel]:
    models = () if deployment is None else map(uncached, deployment.models.values())
    return [model for model in models if isinstance(model, EnsembleModel)]


def wire_again(deployment: Deployment) -> None:
    """One of its models has been replaced. Raises PenstockError when the new one does not fit."""
    for each in _ensembles(deployment):
        each.wire_again()
