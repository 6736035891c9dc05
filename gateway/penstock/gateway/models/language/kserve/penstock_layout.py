"""`backend: "penstock"`: a language model with this server's own settings.

The version folder holds the model, or `model.json` names it and may change any of the server's settings for models,
cache and scheduling, under the names of docs/configuration.md. The configuration's `parameters` do the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from penstock.classic.base import ModelContext
from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.configuration.sections.language_model import (
    OF_OUR_SCHEDULER,
    AdapterConfig,
    CacheConfig,
    DoorConfig,
    EngineConfig,
    LanguageModelConfig,
    ReplicaConfig,
    SchedulingConfig,
)
from penstock.gateway.models.language.engine_sharing import without_engine
from penstock.gateway.models.language.kserve.folder_layout import (
    KV_EVENTS,
    beside,
    check_one_instance,
    model_source,
    read_settings,
    with_offload_where_it_works,
)
from penstock.gateway.models.language.kserve.vllm_form import VLLM_FORM

_FILE = "model.json"
_SETTINGS = frozenset(
    name
    for section in (LanguageModelConfig, ReplicaConfig, EngineConfig, AdapterConfig, CacheConfig, SchedulingConfig)
    for name in section.__struct_fields__
) - {"served_model_name"} | {"engine_address", "engine_key"}


class PenstockLayout:
    form = VLLM_FORM

    def configure(self, server: Config, context: ModelContext) -> Config:
        """The server's settings with the model's own. Raises ConfigError."""
        check_one_instance(context.config)
        given = read_settings(context.version_folder / _FILE, json.loads, "JSON") or {}
        given |= {name: value.string_value for name, value in context.config.parameters.items()}
        unknown = given.keys() - _SETTINGS
        if unknown:
            raise ConfigError(f"{min(unknown)!r} is not a setting of language models")
        if given.get("engine_address") or given.get("replicas") == 0:
            server = without_engine(server)
        given["model"] = model_source(given.get("model"), context, _FILE)
        # the command line's are those of its own model
        for name in ("revision", *KV_EVENTS):
            given.setdefault(name, None)
        _leave_guesses(server, given)
        if isinstance(given["speculative_model"], str):
            given["speculative_model"] = beside(given["speculative_model"], context.version_folder)
        if isinstance(given.get("lora"), list):
            given["lora"] = [_adapter(text, context.version_folder) for text in given["lora"]]
        # the command line's adapters are those of its own model, and so are its replicas and the door of its engine
        adapters = msgspec.structs.replace(server.adapters, lora=(), lora_directory=None)
        own = msgspec.structs.replace(server, adapters=adapters, replication=ReplicaConfig(), door=DoorConfig())
        config = overlay(own, given)
        return config if "kv_offload_dir" in given else with_offload_where_it_works(config)


def _leave_guesses(server: Config, given: dict[str, Any]) -> None:
    """The command line's draft model or draft head is not theirs."""
    given.setdefault("speculative_model", None)
    if server.scheduling.speculative == "mtp":
        given.setdefault("speculative", "off")
    if given["speculative_model"] is None and given.get("speculative", server.scheduling.speculative) == "off":
        given.setdefault("max_draft_tokens", OF_OUR_SCHEDULER["max_draft_tokens"])


def _adapter(text: object, folder: Path) -> object:
    """NAME=FOLDER, where the folder may lie beside the model; anything else as it is, for the settings to refuse."""
    name, equals, path = str(text).partition("=")
    return f"{name}={beside(path, folder)}" if equals else text
