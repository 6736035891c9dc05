"""Loads ensembles, after the models that they are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.ensemble.model import EnsembleModel
from penstock.classic.ensemble.plan import make_plan
from penstock.classic.model_config import ModelConfig
from penstock.gateway.kserve.store import ModelStore

LoadComposing = Callable[[str, frozenset[str]], Awaitable[None]]
"""Sees to it that these models serve, for the ensemble of this name. Raises InvalidRequestError."""


class EnsembleLoader:
    """A Loader."""

    def __init__(self, store: ModelStore, load_composing: LoadComposing) -> None:
        self._store = store
        self._load_composing = load_composing

    async def prepare(self, config: ModelConfig) -> None:
        """Loads the models of an ensemble. Raises InvalidRequestError."""
        await self._load_composing(config.name, make_plan(config).models)

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """An ensemble's configuration is complete."""

    async def load(self, context: ModelContext) -> InferModel:
        return EnsembleModel(context, self._find)

    def _find(self, name: str, version: int) -> InferModel:
        return self._store.model(name, "" if version == -1 else str(version))
