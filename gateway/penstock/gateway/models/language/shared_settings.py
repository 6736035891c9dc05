"""Settings of the models beside MODEL: their own, and those of MODEL that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from msgspec import inspect

from penstock.gateway.configuration.config import SECTIONS, overlay, sections
from penstock.gateway.configuration.plain_values import fields_of
from penstock.gateway.configuration.sections.language_model import OF_OUR_SCHEDULER, ModelSettings
from penstock.gateway.configuration.sections.types import Beside
from penstock.gateway.models.language.engine_sharing import KEPT, is_block_host


def settings_beside(model: ModelSettings, kind: Beside, own: Mapping[str, Any]) -> ModelSettings:
    """Settings of a model that stands beside MODEL, whose settings are `model`: `own`, by name, and of MODEL's those
    that such models share (`sections.types.shared`), but for what their engine would refuse. Raises ConfigError."""
    values = {name: value for section in sections(model).values() for name, value in section.items()}
    common = {name: values[name] for name in _shared(kind) - own.keys()}
    settings = overlay(ModelSettings(), {**common, **own})
    refused = common.keys() & set(_refused(settings, own))
    if not refused:
        return settings
    return overlay(ModelSettings(), {**{name: common[name] for name in common.keys() - refused}, **own})


@cache
def _shared(kind: Beside) -> frozenset[str]:
    """Names of the settings that these models share."""
    return frozenset(
        setting.name
        for section in fields_of(ModelSettings)
        for setting in fields_of(SECTIONS[section.name])
        if _is_shared(setting.type, kind, default=_is_shared(section.type, kind, default=True))
    )


def _is_shared(setting: inspect.Type, kind: Beside, *, default: bool) -> bool:
    marks = (setting.extra or {}) if isinstance(setting, inspect.Metadata) else {}
    return kind in marks["shared"] if "shared" in marks else default


def _refused(settings: ModelSettings, own: Mapping[str, Any]) -> Iterator[str]:
    """Names of settings that the model's engine refuses, or that mean MODEL alone, unless they are its own."""
    engine, scheduling = settings.model.engine, settings.scheduling
    if settings.door.engine_address is not None or not settings.replication.replicas:
        yield from _shared("penstock") - KEPT  # they are set where the engine is started
    chooses = "scheduler" in own or engine in ("auto", "simulated", "vllm")
    if not chooses:
        yield "scheduler"
    by_itself = engine == "tensorrt_llm" or (chooses and scheduling.scheduler == "engine")
    if by_itself:
        yield from OF_OUR_SCHEDULER
    guesses = scheduling.speculative
    if "speculative" not in own and (by_itself or engine == "vllm" or guesses == "mtp"):
        yield "speculative"  # vLLM has guesses of its own, and a draft head is MODEL's
        guesses = "off"
    if guesses == "off" and settings.model.speculative_model is None:
        yield "max_draft_tokens"
    if by_itself or not settings.cache.prefix_caching or not (engine == "auto" or is_block_host(engine)):
        yield from ("kv_offload_dir", "kv_offload_bytes")
