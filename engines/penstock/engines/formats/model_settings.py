"""Settings in config.json that all engines read: the language model's part of it, its longest context, draft heads.

A checkpoint that also takes images has the language model's settings in one object, and its tensors under other names.

Some models were stretched: their positions are turned by less than in training, and the context is as many times longer
(RoPE types linear and yarn). Some makers have max_position_embeddings say what the model was trained with, as
transformers' documentation has it, others say the longer one there (DeepSeek, gpt-oss). With
original_max_position_embeddings these can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.engines.errors import UnsupportedError

_LLAMA3 = {"rms_norm_eps": 1e-5}
_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8}
_QWEN2 = {"mrope_section": [16, 24, 24]}
_QWEN3 = {"rope_theta": 500000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_QWEN3_EXPERTS = _QWEN3 | {
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "tensor_layout": "stacked experts",
}
_QWEN3_5 = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
_TEXT_PARTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", _GEMMA3),
    "Gemma3nForConditionalGeneration": ("Gemma3nForCausalLM", {}),
    "Gemma4UnifiedForConditionalGeneration": ("Gemma4UnifiedForCausalLM", {}),
    "Gemma4ForConditionalGeneration": ("Gemma4ForCausalLM", {}),
    "Idefics3ForConditionalGeneration": ("LlamaForCausalLM", _LLAMA3),
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", {}),
    "InternVLForConditionalGeneration": ("Qwen2ForCausalLM", {}),
    "Lfm2VlForConditionalGeneration": ("Lfm2ForCausalLM", {}),
    "LlavaForConditionalGeneration": ("LlamaForCausalLM", {}),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", {}),
    "SmolVLMForConditionalGeneration": ("LlamaForCausalLM", _LLAMA3),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", _QWEN2),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", _QWEN3),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3MoeForCausalLM", _QWEN3_EXPERTS),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", _QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", _QWEN3_5),
}
"""By architecture: that of the language model, and what its settings mean where they are left out."""
TEXT_PARTS = tuple(_TEXT_PARTS)
_MISTRALS = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"}
_SEVERAL = {**_MISTRALS, "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_BY_TYPE = {
    "InternVLForConditionalGeneration": _SEVERAL,
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"},
    "LlavaForConditionalGeneration": _SEVERAL,
    "Mistral3ForConditionalGeneration": _MISTRALS,
}
"""By architecture, and by model_type of the language model where there are several."""

_PREFIXES = ("model.language_model.", "model.text_model.", "language_model.model.", "language_model.", "backbone.")
"""language_model. alone where the whole model was saved without a head; backbone. of Nemotron-H."""
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
    "model.connector.",
    "model.audio_tower.",
    "model.vision_embedder.",
    "model.embed_audio.",
    "model.embed_vision.",
)


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of config.json, those of the language model; of one that is nothing else, as they are.

    Some of these models give a text token three positions, all of them the same: that is plain RoPE.
    """
    names = settings.get("architectures")
    known = [name for name in names if name in _TEXT_PARTS] if isinstance(names, list) else []
    if not known:
        return settings
    architecture, defaults = _TEXT_PARTS[known[0]]
    inner = settings.get("text_config") or {}
    if not isinstance(inner, Mapping):
        raise UnsupportedError(f"config.json has text_config={str(inner)[:50]}, which is not an object")
    kind = inner.get("model_type")
    types = _BY_TYPE.get(known[0])
    if types is not None and kind is not None:
        if kind not in types:
            raise UnsupportedError(
                f"{known[0]} is supported with a text_config of {' or '.join(types)}, not of {str(kind)[:50]!r}"
            )
        architecture = types[kind]
    outer = {key: value for key, value in settings.items() if key not in ("text_config", "vision_config")}
    merged = {**defaults, **outer, **inner, "architectures": [architecture]}
    if _TIED in outer:
        merged[_TIED] = outer[_TIED]
    for key in ("rope_scaling", "rope_parameters"):
        rope = merged.get(key)
        if isinstance(rope, Mapping) and "mrope" in (rope.get("rope_type"), rope.get("type")):
            merged[key] = {**rope, "rope_type": "default", "type": "default"}
    return merged


def text_name(name: str) -> str | None:
    """Of a tensor or a layer; None: it is no part of the language model."""
    if name.startswith(_OTHERS):
        return None
    if name.startswith(_HEAD):
        return name.removeprefix("language_model.")
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else "model." + name.removeprefix(prefix)


_LONGEST = 1 << 26
"""Several times that of any known model."""
_STRETCHING = ("linear", "yarn")
_LONGROPE = ("longrope", "su")
"""The second is the name of older checkpoints."""
_STRETCHED_ALREADY = "gemma3"
"""Has linear, and neither of the two lengths is that of the training."""


def context_length(config: Mapping[str, Any], chosen: int | None = None) -> int | None:
    """In tokens; `config` is config.json, or the language model's part of it, with its defaults. None: it says nothing.
    With longrope, the context of the short frequencies unless more was `chosen`. Raises UnsupportedError for settings
    that are not understood."""
    longest = config.get("max_position_embeddings")
    if type(longest) is not int:
        return None
    for settings in rope_settings(config):
        kind = settings.get("rope_type") or settings.get("type")
        if kind in _LONGROPE:
            original = _original(config, settings)
            if original is None:
                raise UnsupportedError("RoPE type 'longrope' needs 'original_max_position_embeddings' in config.json")
            longest = longest if (chosen or 0) > original else min(longest, original)
        elif kind in _STRETCHING and not _is_stretched(config):
            longest = max(longest, _stretched(config, settings, longest))
    return longest


def rope_settings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of each type of layers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, Mapping):
        nested = [value for value in rope.values() if isinstance(value, Mapping)]
        yield from nested or [rope]


def _is_stretched(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    named = [*(names if isinstance(names, list) else []), config.get("model_type")]
    return any(str(name).lower().startswith(_STRETCHED_ALREADY) for name in named)


def _stretched(config: Mapping[str, Any], settings: Mapping[str, Any], longest: int) -> int:
    factor = settings.get("factor")
    if factor is None:  # the ratio of the two lengths, in yarn
        return longest
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < _LONGEST:
        raise UnsupportedError(f"config.json has a RoPE factor of {str(factor)[:50]}, which is not a valid factor")
    length = int(factor * (_original(config, settings) or longest))
    if length > _LONGEST:
        raise UnsupportedError(f"config.json's RoPE settings make a context of {length} tokens, more than {_LONGEST}")
    return length


def _original(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    key = "original_max_position_embeddings"
    length = settings.get(key) or config.get(key)
    if length is not None and (type(length) is not int or not 0 < length <= _LONGEST):
        raise UnsupportedError(f"config.json has {key}={str(length)[:50]}, which is not a number of tokens")
    return length


_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def is_eagle3(settings: Mapping[str, Any]) -> bool:
    """Whether this config.json is that of an EAGLE-3 head. EAGLE's own checkpoints say LlamaForCausalLM."""
    names = settings.get("architectures")
    return "draft_vocab_size" in settings or (isinstance(names, list) and any(name in _EAGLE3 for name in names))
