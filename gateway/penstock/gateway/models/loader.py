"""The loader of the models that this server computes: those of the command line, and language models of
repositories."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Literal

from penstock.engines.encoder.model_folder import makes_vectors
from penstock.engines.errors import PenstockError
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.configuration.sections.other_models import EmbeddingsConfig
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.hub import check_revision, fetch_draft_model, fetch_model
from penstock.gateway.models.language.kserve.folder_layout import check_installed
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import LoadedModel, ModelSource, find_model, is_hub_id
from penstock.gateway.models.pooling.builder import build_pooling_model
from penstock.gateway.models.pooling.model import PoolingModel

Model = LoadedModel | PoolingModel


@dataclass(frozen=True, slots=True, eq=False)
class LoadableModel:
    """A model that can be loaded."""

    settings: ModelSettings
    names: tuple[str, ...] = ()
    """Empty: that of the folder, or the hub id."""
    task: Literal["generate", "pool"] | None = None
    """None: what its files say."""

    @property
    def is_on_hub(self) -> bool:
        """Whether something has to be downloaded."""
        model = self.settings.model
        return is_hub_id(model.model) or is_hub_id(model.speculative_model)

    @property
    def public_names(self) -> tuple[str, ...]:
        """Raises ConfigError for a folder that is not there."""
        model = self.settings.model.model
        if self.names:
            return self.names
        return (model,) if model is not None and is_hub_id(model) else (find_model(model).name,)


class ModelLoader:
    """Fetches, builds and starts models, those of the command line and of repositories alike. Their names are taken at
    once where requests wait for the model, and when it has started where it may replace another."""

    def __init__(self, builder: ModelBuilder, catalogue: Catalogue, embeddings: EmbeddingsConfig) -> None:
        self._builder = builder
        self._catalogue = catalogue
        self._batch_tokens = embeddings.embedding_batch_tokens

    def prepare(self, entry: LoadableModel) -> Model | None:
        """A model whose files are here is built at once, and takes its names. None for one of the hub, which is only
        announced. Raises ConfigError, AlreadyExistsError."""
        model = entry.settings.model
        check_revision(model.model, model.revision)
        if entry.is_on_hub:
            self._builder.board.announce(entry.public_names)
            return None
        built = self._build(entry, find_model(model.model))
        self.take_names(built)
        return built

    async def fetch(self, entry: LoadableModel) -> Model:
        """Downloads what is not here, and builds the model. Raises ConfigError."""
        settings = entry.settings
        check_installed(settings.model.engine)
        report = self._builder.board.reporter(entry.public_names)
        try:
            source = await fetch_model(settings.model.model, report, settings.model.revision)
            settings = await fetch_draft_model(settings, report)
            # in a thread: a large tokenizer takes its time
            return await asyncio.to_thread(self._build, replace(entry, settings=settings), source)
        finally:
            report(None)

    def _build(self, entry: LoadableModel, source: ModelSource) -> Model:
        names = entry.names or (source.name,)
        if entry.task == "pool" or (entry.task is None and makes_vectors(source.folder)):
            return build_pooling_model(entry.settings, source, names, self._builder, self._batch_tokens)
        return self._builder.build(entry.settings, source, names)

    def take_names(self, model: Model) -> None:
        """From now on requests that name it are told that it is loading. Nothing happens the second time. Raises
        AlreadyExistsError."""
        self._catalogue.add(model)

    async def start(self, model: Model) -> None:
        """Returns when it serves requests, under its own names at the latest now. Raises PenstockError, and nothing of
        its engine is left then."""
        try:
            await model.start()
            self.take_names(model)
        except PenstockError:
            await model.stop()
            raise
        finally:
            self._builder.board.reporter(model.names)(None)
        self._catalogue.serve(model)

    async def load(self, settings: ModelSettings, name: str) -> LoadedModel:
        """A language model of a repository, which serves from then on. Raises ConfigError, PenstockError."""
        model = await self.fetch(LoadableModel(settings, (name,), "generate"))
        await self.start(model)
        assert isinstance(model, LoadedModel)
        return model
