"""`backend: "openai"` of a model repository: a folder whose `model.json` says which server has the model.

It holds the settings of docs/upstream.md, without `name`, which is the folder's. The configuration's `parameters` may
set those that are no lists or tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.model_config import ModelConfig
from penstock.gateway.configuration.config import ConfigError, explain
from penstock.gateway.configuration.plain_values import plain_settings
from penstock.gateway.configuration.upstream_settings import UpstreamSettings
from penstock.gateway.llm.kserve.folder_layout import beside, check_one_instance, read_settings
from penstock.gateway.upstream.kserve_model import FORM, KServeUpstream
from penstock.gateway.upstream.service import Upstreams

_FILE = "model.json"
_FILES = ("api_key_file", "ca_file")


class UpstreamLoader:
    """A Loader of the model repository."""

    def __init__(self, upstreams: Callable[[], Upstreams]) -> None:
        self._upstreams = upstreams

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """The tensors of the form, and whether the settings can be read. Raises ValueError."""
        upstream_settings(config, version_folder)
        FORM.complete(config)

    async def load(self, context: ModelContext) -> InferModel:
        FORM.check(context.config)
        check_one_instance(context.config)
        context.config.model_transaction_policy.decoupled = True  # also where nothing completes configurations
        upstreams = self._upstreams()
        model = upstreams.build(upstream_settings(context.config, context.version_folder))
        upstreams.add(model)
        return KServeUpstream(upstreams, model, version=context.version, config=context.config)


def upstream_settings(config: ModelConfig, folder: Path) -> UpstreamSettings:
    """Of a model's folder. Raises ConfigError."""
    given: dict[str, Any] = read_settings(folder / _FILE, json.loads, "JSON") or {}
    given |= {name: value.string_value for name, value in config.parameters.items()}
    if "name" in given:
        raise ConfigError("'name' is the folder's")
    for name in _FILES:
        if isinstance(given.get(name), str):
            given[name] = beside(given[name], folder)
    try:
        plain = plain_settings(UpstreamSettings, {**given, "name": config.name})
        return msgspec.convert(plain, UpstreamSettings, strict=False)
    except ValueError as error:  # msgspec's among them
        raise ConfigError(explain(str(error))) from None
