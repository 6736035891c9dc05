"""Loaders of the language models of a model repository, one for each backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.model_config import ModelConfig
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.kserve.folder_layout import ENGINES, Layout
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.kserve.penstock_layout import PenstockLayout
from penstock.gateway.models.language.kserve.trtllm_layout import TrtllmLayout
from penstock.gateway.models.language.kserve.vllm_layout import VllmLayout
from penstock.gateway.models.language.models import LoadedModel

LANGUAGE_BACKENDS = ("penstock", "tensorrtllm", "vllm")
"""Of models of this server. Those of other servers have the backend `openai` (`upstream/`)."""

LoadModel = Callable[[ModelSettings, str], Awaitable[LoadedModel]]
"""Loads a model under this public name; it serves from then on. Raises ConfigError, PenstockError."""


class LanguageModelLoader:
    """A Loader of the model repository."""

    def __init__(self, defaults: ModelSettings, dataplane: DataPlane, load: LoadModel, layout: Layout) -> None:
        """`defaults`: see `Layout.configure`."""
        self._defaults = defaults
        self._dataplane = dataplane
        self._load = load
        self._layout = layout

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """The tensors of the layout's form. Raises ValueError for a configuration with others."""
        self._layout.form.complete(config)

    async def load(self, context: ModelContext) -> InferModel:
        self._layout.form.check(context.config)
        context.config.model_transaction_policy.decoupled = True  # also where nothing completes configurations
        settings = await asyncio.to_thread(self._layout.configure, self._defaults, context)
        return LanguageModel(
            self._dataplane,
            await self._load(settings, context.name),
            context.name,
            policy=settings.scheduling.policy,
            version=context.version,
            config=context.config,
            form=self._layout.form,
        )


def language_loaders(
    defaults: ModelSettings, dataplane: DataPlane, load: LoadModel, options: Mapping[str, Mapping[str, str]]
) -> dict[str, LanguageModelLoader]:
    """A loader for each of LANGUAGE_BACKENDS. `options`: RepositorySettings.backend_options. Raises ConfigError."""
    layouts: dict[str, Layout] = {
        "penstock": PenstockLayout(),
        "tensorrtllm": TrtllmLayout(_engine(options, "tensorrtllm", "tensorrt_llm")),
        "vllm": VllmLayout(_engine(options, "vllm", "vllm")),
    }
    _check_options("penstock", options.get("penstock", {}), ())
    return {name: LanguageModelLoader(defaults, dataplane, load, layout) for name, layout in layouts.items()}


def _engine(options: Mapping[str, Mapping[str, str]], backend: str, default: str) -> str:
    settings = options.get(backend, {})
    _check_options(backend, settings, ("engine",))
    engine = settings.get("engine", default)
    if engine not in ENGINES:
        raise ConfigError(f"backend-config: {backend},engine={engine!r} is none of {', '.join(ENGINES)}")
    return engine


def _check_options(backend: str, settings: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in settings:
        if name not in known:
            raise ConfigError(f"backend-config: the backend {backend} has no setting {name!r}")
