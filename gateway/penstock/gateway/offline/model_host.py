"""The one model of an LLM, on its event loop."""

from __future__ import annotations

import asyncio
import sys

from penstock.engines.client.engine import Engine
from penstock.engines.contract.loading import silent
from penstock.engines.encoder.model_folder import makes_vectors
from penstock.gateway.configuration.config import Config
from penstock.gateway.front.loading_board import LoadingBoard
from penstock.gateway.front.work_pool import WorkPools
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.hub import fetch_draft_model, fetch_model
from penstock.gateway.llm.model_builder import build_model
from penstock.gateway.llm.models import LoadedModel, ModelSource
from penstock.gateway.memory.budget import MemoryBudget
from penstock.gateway.pooling.builder import build_pooling_model
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.plane import PoolingPlane


class ModelHost:
    """Loads it, and lets it be asked through the same planes as in a server."""

    def __init__(self, config: Config) -> None:
        self.config = config
        timeout = config.scheduling.request_timeout or None
        pool = WorkPools(text_cost=sys.maxsize).text
        self.dataplane = DataPlane(
            request_timeout=timeout, clamp_max_tokens=config.server.clamp_max_tokens, text_pool=pool
        )
        self.pooling = PoolingPlane(self.dataplane, request_timeout=timeout, text_pool=pool)
        self._model: LoadedModel | PoolingModel | None = None

    @property
    def name(self) -> str:
        return "" if self._model is None else self._model.names[0]

    @property
    def makes_vectors(self) -> bool:
        return isinstance(self._model, PoolingModel)

    @property
    def generating(self) -> LoadedModel:
        """A model that generates."""
        assert isinstance(self._model, LoadedModel)
        return self._model

    @property
    def engine(self) -> Engine:
        return self.generating.engine

    async def start(self) -> None:
        """Raises ConfigError, PenstockError."""
        wanted = self.config.model
        source = await fetch_model(wanted.model, silent, wanted.revision)
        self.config = await fetch_draft_model(self.config, silent)
        model = await asyncio.to_thread(self._build, source)
        if isinstance(model, PoolingModel):
            await model.source.start()
            self.pooling.add(model)
        else:
            await model.start()
            self.dataplane.models.add(model)
        self._model = model
        model.loaded = True

    def _build(self, source: ModelSource) -> LoadedModel | PoolingModel:
        if makes_vectors(source.folder):
            return build_pooling_model(self.config, source, (source.name,), MemoryBudget(), LoadingBoard())
        return build_model(self.config, source)

    async def stop(self) -> None:
        if isinstance(self._model, PoolingModel):
            await self._model.source.stop()
        elif self._model is not None:
            await self._model.stop()
