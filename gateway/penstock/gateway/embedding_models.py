"""The embedding and ranking models of a server: those of --embedding-model, and MODEL where it is one."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from penstock.engines.errors import AlreadyExistsError
from penstock.engines.host.failure_text import failures_of
from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.configuration.sections.language_model import OF_OUR_SCHEDULER, DoorConfig, ReplicaConfig
from penstock.gateway.front.loading_board import LoadingBoard
from penstock.gateway.llm.hub import fetch_model
from penstock.gateway.llm.models import ModelSource, find_model, is_hub_id
from penstock.gateway.memory.budget import MemoryBudget
from penstock.gateway.pooling.builder import build_pooling_model
from penstock.gateway.pooling.kserve_model import VectorModel, is_offered
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.repository.manager import ModelRepository

logger = logging.getLogger("penstock")

_OF_MODEL = (
    "engine",
    "device",
    "max_model_len",
    "weights",
    "activations",
    "threads",
    "cpus",
    "numa_nodes",
    "chat_template",
    "revision",
    "speculative_model",
)
"""Settings of MODEL, which those beside it do not share."""


class EmbeddingModels:
    """What is in a folder is checked at once; what comes from the hub when it is here, after the ports are open."""

    def __init__(
        self, config: Config, plane: PoolingPlane, models: ModelRepository, budget: MemoryBudget, board: LoadingBoard
    ) -> None:
        """`models`: what they are added to as KServe models. Raises ConfigError."""
        self._plane = plane
        self._models = models
        self._budget = budget
        self._board = board
        self._to_fetch: dict[str, str] = {}
        """Hub ids by name."""
        defaults = {name: getattr(type(config.model)(), name) for name in _OF_MODEL}
        no_guesses = {name: OF_OUR_SCHEDULER[name] for name in ("speculative", "max_draft_tokens")}
        alone = msgspec.to_builtins(ReplicaConfig()) | msgspec.to_builtins(DoorConfig())
        self._beside = overlay(config, defaults | no_guesses | alone | {"lora": (), "lora_directory": None})
        for text in config.embeddings.embedding_model:
            name, equals, place = text.partition("=")
            place = place if equals else text
            if is_hub_id(place):
                self._to_fetch[name] = place
                board.announce((name,))
            else:
                source = find_model(place)
                self.add(self._build(source, name if equals else source.name))

    def _build(self, source: ModelSource, name: str) -> PoolingModel:
        return build_pooling_model(self._beside, source, (name,), self._budget, self._board)

    def add(self, model: PoolingModel) -> None:
        """It is loaded with the others. Raises ConfigError."""
        try:
            self._plane.add(model)
        except AlreadyExistsError as error:
            raise ConfigError(f"embedding-model: {error.message}") from None

    async def start(self) -> None:
        """Raises ConfigError, PenstockError."""
        for name, hub_id in self._to_fetch.items():
            report = self._board.reporter((name,))
            try:
                source = await fetch_model(hub_id, report)
                self.add(await asyncio.to_thread(self._build, source, name))
            finally:
                report(None)
        for model in self._plane.known_models():
            report = self._board.reporter(model.names)
            try:
                with failures_of(model.names[0]):
                    await model.source.start()
            finally:
                report(None)
            model.loaded = True
            if is_offered(model):
                for name in model.names:
                    self._models.add(VectorModel(self._plane, model, name))
            info = model.source.info
            kind = f"{info.output_size} numbers for a text" if model.head is None else f"{info.output_size} labels"
            logger.info(
                "ready: %s on %s; texts of up to %d tokens, %s", model.names[0], info.runner, info.max_tokens, kind
            )

    async def stop(self) -> None:
        for model in self._plane.known_models():
            await model.source.stop()
