"""`backend: "penstock"`: a language model with this server's own settings.

The version folder holds the model, or `model.json` names it and may change any of the server's settings for models,
cache and scheduling, under the names of docs/configuration.md. The configuration's `parameters` do the same.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.classic.base import ModelContext
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    LanguageModelConfig,
    ModelSettings,
    ReplicaConfig,
    SchedulingConfig,
)
from penstock.gateway.models.language.kserve.folder_layout import (
    beside,
    check_one_instance,
    model_source,
    read_settings,
)
from penstock.gateway.models.language.kserve.vllm_form import VLLM_FORM
from penstock.gateway.models.language.shared_settings import settings_beside

_FILE = "model.json"
_SETTINGS = frozenset(
    name
    for section in (LanguageModelConfig, ReplicaConfig, EngineConfig, AdapterConfig, CacheConfig, SchedulingConfig)
    for name in section.__struct_fields__
) - {"served_model_name"} | {"engine_address", "engine_key"}


class PenstockLayout:
    form = VLLM_FORM

    def configure(self, defaults: ModelSettings, context: ModelContext) -> ModelSettings:
        """Raises ConfigError."""
        check_one_instance(context.config)
        own = read_settings(context.version_folder / _FILE, json.loads, "JSON") or {}
        own |= {name: value.string_value for name, value in context.config.parameters.items()}
        unknown = own.keys() - _SETTINGS
        if unknown:
            raise ConfigError(f"{min(unknown)!r} is not a setting of language models")
        own["model"] = model_source(own.get("model"), context, _FILE)
        if isinstance(own.get("speculative_model"), str):
            own["speculative_model"] = beside(own["speculative_model"], context.version_folder)
        if isinstance(own.get("lora"), list):
            own["lora"] = [_adapter(text, context.version_folder) for text in own["lora"]]
        return settings_beside(defaults, "penstock", own)


def _adapter(text: object, folder: Path) -> object:
    """NAME=FOLDER, where the folder may lie beside the model; anything else as it is, for the settings to refuse."""
    name, equals, path = str(text).partition("=")
    return f"{name}={beside(path, folder)}" if equals else text
