"""The options of an LLM: those settings of a server that concern a model and its engine, by the same names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from penstock.gateway.configuration.config import Config, overlay
from penstock.gateway.configuration.sections.language_model import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    LanguageModelConfig,
    ReplicaConfig,
    SchedulingConfig,
    SimulatedOptions,
)

_SECTIONS = (
    LanguageModelConfig,
    ReplicaConfig,
    EngineConfig,
    AdapterConfig,
    CacheConfig,
    SchedulingConfig,
    SimulatedOptions,
)
_OF_SERVERS = {"model", "served_model_name", "lora_directory", "max_queued_requests", "max_queued_tokens"}
_OTHERS = {"clamp_max_tokens", "embedding_batch_tokens", "load_timeout", "log_level", "watchdog_timeout"}
OPTIONS = frozenset({name for section in _SECTIONS for name in section.__struct_fields__} - _OF_SERVERS | _OTHERS)
_DEFAULTS: Mapping[str, Any] = {
    "log_level": "warning",
    # One program has one queue, which `LLM` keeps short itself.
    "max_queued_requests": sys.maxsize,
    "max_queued_tokens": sys.maxsize,
}


def read_options(model: str | None, options: Mapping[str, Any]) -> Config:
    """Raises TypeError for a name that is no option, ConfigError for a value that cannot be."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"LLM has no option {name!r}")
    return overlay(Config(), {**_DEFAULTS, **options, "model": model})
