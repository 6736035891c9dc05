"""Which checkpoints are draft heads, or have one: layers that guess next tokens from a model's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_MTP = ("MiMoForCausalLM",)


def is_eagle3(settings: Mapping[str, Any]) -> bool:
    """Whether this config.json is that of an EAGLE-3 head. EAGLE's own checkpoints say LlamaForCausalLM."""
    return "draft_vocab_size" in settings or _names_any(settings, _EAGLE3)


def has_mtp_head(settings: Mapping[str, Any]) -> bool:
    """Whether models with this config.json have a layer for multi-token prediction of a kind that is known here."""
    return _names_any(settings, _MTP)


def _names_any(settings: Mapping[str, Any], architectures: tuple[str, ...]) -> bool:
    names = settings.get("architectures")
    return isinstance(names, list) and any(name in architectures for name in names)
