"""The model that the command names: known through every door from the start, ready when it is loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.engines.door.spec import DoorSpec
from penstock.engines.encoder.model_folder import makes_vectors
from penstock.engines.host.failure_text import failures_of
from penstock.gateway.configuration.config import Config
from penstock.gateway.embedding_models import EmbeddingModels
from penstock.gateway.front.first_steps import Kind
from penstock.gateway.front.loading_board import LoadingBoard
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.hub import check_revision, fetch_draft_model, fetch_model
from penstock.gateway.llm.kserve.language_model import LanguageModel
from penstock.gateway.llm.model_builder import build_model, public_names
from penstock.gateway.llm.models import LoadedModel, ModelSource, find_model, is_hub_id
from penstock.gateway.memory.budget import MemoryBudget
from penstock.gateway.pooling.builder import build_pooling_model
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.repository.manager import ModelRepository

logger = logging.getLogger("penstock")


class CommandLineModel:
    """What is in a folder is checked at once; what comes from the hub when it is here, after the ports are open."""

    def __init__(
        self,
        config: Config,
        dataplane: DataPlane,
        models: ModelRepository,
        budget: MemoryBudget,
        board: LoadingBoard,
        embeddings: EmbeddingModels,
        new_door: Callable[[], DoorSpec] | None = None,
    ) -> None:
        """`new_door`: as for `build_model`. Raises ConfigError."""
        self._config = config
        self._dataplane = dataplane
        self._models = models
        self._budget = budget
        self._board = board
        self._embeddings = embeddings
        self._new_door = new_door
        self._names = public_names(config, config.model.model or "")
        self._model: LoadedModel | None = None
        check_revision(config.model.model, config.model.revision)
        if is_hub_id(config.model.model) or is_hub_id(config.model.speculative_model):
            board.announce(self._names)
        else:
            self._add(self._build(find_model(config.model.model)))

    def _build(self, source: ModelSource) -> LoadedModel | PoolingModel:
        if makes_vectors(source.folder):
            return build_pooling_model(self._config, source, self._names, self._budget, self._board)
        return build_model(self._config, source, budget=self._budget, board=self._board, new_door=self._new_door)

    def _add(self, model: LoadedModel | PoolingModel) -> None:
        if isinstance(model, PoolingModel):
            self._embeddings.add(model)
            return
        self._dataplane.models.add(model)
        for name in model.names:
            self._models.add(LanguageModel(self._dataplane, model, name, policy=self._config.scheduling.policy))
        self._model = model

    async def start(self) -> None:
        """An embedding model is started with the others of its kind. Raises ConfigError, PenstockError."""
        if self._names[0] in self._board:
            report = self._board.reporter(self._names)
            try:
                source = await fetch_model(self._config.model.model, report, self._config.model.revision)
                self._config = await fetch_draft_model(self._config, report)
                self._add(await asyncio.to_thread(self._build, source))
            finally:
                report(None)
        if self._model is None:
            return
        with failures_of(self._model.names[0]):
            await self._model.start()
        self._dataplane.models.serve(self._model)
        info = self._model.engine.info
        num_groups = len(info.kv_groups)
        logger.info(
            "ready: %s on %s; context %d tokens, KV cache %d blocks of %d tokens%s",
            self._model.names[0],
            info.runner,
            info.context_length,
            info.num_blocks,
            info.block_size,
            f", shared by {num_groups} groups of layers" if num_groups > 1 else "",
        )

    @property
    def name_and_kind(self) -> tuple[str, Kind] | None:
        """Of the loaded model; None while there is none, and for one that gives embeddings or scores."""
        if self._model is None:
            return None
        return self._model.names[0], "completion" if self._model.chat_template is None else "chat"

    async def stop(self) -> None:
        if self._model is not None:
            await self._model.stop()
