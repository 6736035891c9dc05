"""The language model in a checkpoint that also takes images: its settings, and its tensors by their usual names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engines.errors import UnsupportedError

_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8}
_TEXT_PARTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", _GEMMA3),
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", {}),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", {}),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", {}),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", {}),
}
"""By architecture: that of the language model, and what its settings mean where they are left out."""
TEXT_PARTS = tuple(_TEXT_PARTS)

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
"""The last where the whole model was saved without a head."""
_TIED = "tie_word_embeddings"
"""What the whole model says of it holds."""
_HEAD = "language_model.lm_head"
_OTHERS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.vision_model.",
    "model.visual.",
    "model.multi_modal_projector.",
)


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of config.json, those of the language model; of one that is nothing else, as they are.

    Some of these models give a text token three positions, all of them the same: that is plain RoPE.
    """
    names = settings.get("architectures")
    found = [name for name in names if name in _TEXT_PARTS] if isinstance(names, list) else []
    if not found:
        return settings
    architecture, defaults = _TEXT_PARTS[found[0]]
    inner = settings.get("text_config") or {}
    if not isinstance(inner, Mapping):
        raise UnsupportedError(f"config.json has text_config={str(inner)[:50]}, which is not an object")
    kind = inner.get("model_type")
    if architecture == "MistralForCausalLM" and kind not in (None, "mistral"):
        raise UnsupportedError(f"{found[0]} is supported with a text_config of Mistral's, not of {str(kind)[:50]!r}")
    outer = {key: value for key, value in settings.items() if key not in ("text_config", "vision_config")}
    given = {**defaults, **outer, **inner, "architectures": [architecture]}
    if _TIED in outer:
        given[_TIED] = outer[_TIED]
    for key in ("rope_scaling", "rope_parameters"):
        rope = given.get(key)
        if isinstance(rope, Mapping) and "mrope" in (rope.get("rope_type"), rope.get("type")):
            given[key] = {**rope, "rope_type": "default", "type": "default"}
    return given


def text_name(name: str) -> str | None:
    """Of a tensor or a layer; None: it is no part of the language model."""
    if name.startswith(_OTHERS):
        return None
    if name.startswith(_HEAD):
        return name.removeprefix("language_model.")
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else "model." + name.removeprefix(prefix)
