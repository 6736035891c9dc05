"""Language models in a model repository: `backend: "penstock"`.

The version folder holds the model, or `model.json` names it and may change any of the server's settings for models,
cache and scheduling, under the names of docs/configuration.md. The configuration's `parameters` do the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.classic.base import InferModel, ModelContext
from penstock.engines.classic.model_config import ModelConfig
from penstock.engines.errors import PenstockError
from penstock.gateway.config import Config, ConfigError, overlay
from penstock.gateway.config_sections import AdapterConfig, CacheConfig, EngineConfig, SchedulingConfig
from penstock.gateway.config_sections import ModelConfig as ModelSection
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.kserve.llm import LanguageModel
from penstock.gateway.kserve.vllm_form import VLLM_FORM
from penstock.gateway.models import LoadedModel

SETTINGS_FILE = "model.json"
_SETTINGS = frozenset(
    name
    for section in (ModelSection, EngineConfig, AdapterConfig, CacheConfig, SchedulingConfig)
    for name in section.__struct_fields__
) - {"served_model_name"}

BuildModel = Callable[[Config, str], LoadedModel]
"""Makes a model that can be started, under this public name."""


class LanguageModelLoader:
    """A Loader of the model repository."""

    def __init__(self, config: Config, dataplane: DataPlane, build: BuildModel) -> None:
        # the adapters of the command line are those of its own model
        adapters = msgspec.structs.replace(config.adapters, lora=(), lora_directory=None)
        self._config = msgspec.structs.replace(config, adapters=adapters)
        self._dataplane = dataplane
        self._build = build

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """The tensors are the same for every language model. Raises ValueError for a configuration with others."""
        VLLM_FORM.complete(config)

    async def load(self, context: ModelContext) -> InferModel:
        config = self._settings(context)
        model = self._build(config, context.name)
        try:
            await model.engine.start()
            self._dataplane.add(model)
        except PenstockError:
            await model.engine.stop()
            raise
        model.loaded = True
        return LanguageModel(
            self._dataplane,
            model,
            context.name,
            policy=config.scheduling.policy,
            version=context.version,
            config=context.config,
        )

    def _settings(self, context: ModelContext) -> Config:
        """The server's settings with the model's own. Raises ConfigError."""
        given: dict[str, Any] = _read(context.version_folder / SETTINGS_FILE)
        given |= {name: value.string_value for name, value in context.config.parameters.items()}
        unknown = given.keys() - _SETTINGS
        if unknown:
            raise ConfigError(f"{min(unknown)!r} is not a setting of language models")
        given["model"] = _source(given.get("model"), context)
        if isinstance(given.get("lora"), list):
            given["lora"] = [_adapter(text, context.version_folder) for text in given["lora"]]
        return overlay(self._config, given)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"{path.name} cannot be read as JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} must hold an object of settings")
    return found


def _adapter(text: object, folder: Path) -> object:
    """NAME=FOLDER, where the folder may lie beside the model; anything else as it is, for the settings to refuse."""
    name, equals, path = str(text).partition("=")
    return f"{name}={folder / path}" if equals and (folder / path).is_dir() else text


def _source(model: object, context: ModelContext) -> str:
    """A folder of the repository, or whatever `penstock serve` takes as MODEL."""
    folder = context.version_folder
    if model is None:
        if (folder / "config.json").is_file():
            return str(folder)
        raise ConfigError(f"there is neither a model in version {context.version} nor a 'model' in {SETTINGS_FILE}")
    if not isinstance(model, str):
        raise ConfigError("'model' must be a text")
    local = folder / model
    return str(local) if local.is_dir() else model
