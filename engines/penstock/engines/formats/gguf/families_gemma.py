"""Gemma in GGUF files."""

from __future__ import annotations

from types import MappingProxyType

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    FOUR_NORMS,
    MLP,
    Architecture,
    Config,
    layer_types,
    named,
)
from penstock.engines.formats.gguf.container import FileSettings

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""The one size of Gemma 2, and of Gemma 3, that scales its queries by another number than head_dim."""


def gemma2(settings: FileSettings, config: Config) -> Config:
    return {
        "query_pre_attn_scalar": _gemma_scale(config, _GEMMA2_27B_LAYERS),
        "sliding_window": settings.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
    }


def gemma3(settings: FileSettings, config: Config) -> Config:
    scale = _gemma_scale(config, _GEMMA3_27B_LAYERS)
    return {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": scale}


def gemma4(settings: FileSettings, config: Config) -> Config:
    """Layers without a window have heads of another size, and those of them that rotate nowhere are in the file as
    divisors that leave no angle."""
    kinds, wide = layer_types(settings, config), settings.get("feed_forward_length")
    heads = settings.get("attention.head_count_kv")
    by_kind = dict(zip(kinds, heads, strict=False)) if isinstance(heads, list) else dict.fromkeys(kinds, heads)
    divisors = config.get("rope_scaling", {}).get("divisors") or [1.0]
    rotated = sum(divisor < _NO_ANGLE for divisor in divisors) / len(divisors)
    whole = {"rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": config["rope_theta"]}
    windowed = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base_swa", 1e4)}
    if settings.get("expert_count"):
        raise UnsupportedError("the GGUF file has gemma4.expert_count: Gemma 4's mixture is not read from GGUF files")
    own, table = settings.get("embedding_length_per_layer_input"), settings.tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": kinds,
        "head_dim": settings.count("attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": by_kind.get("sliding_attention"),
        "num_global_key_value_heads": by_kind.get("full_attention"),
        "attention_k_eq_v": any(
            f"blk.{n}.attn_k.weight" in settings.tensors and f"blk.{n}.attn_v.weight" not in settings.tensors
            for n in range(len(kinds))
        ),
        "num_kv_shared_layers": settings.get("attention.shared_kv_layers") or 0,
        "use_double_wide_mlp": isinstance(wide, list) and len(set(wide)) > 1,
        "hidden_size_per_layer_input": own or 0,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else config["vocab_size"],
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": whole, "sliding_attention": windowed},
        "rope_scaling": None,
    }


_NO_ANGLE = 1e29
"""What is divided by more than this is 0."""


def _gemma_scale(config: Config, layers_of_27b: int) -> int:
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scale: int = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return scale


_OWN_EMBEDDINGS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_EMBEDDINGS_OF_LAYERS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

ARCHITECTURES = {
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        named(
            ATTENTION,
            MLP,
            FOUR_NORMS,
            _OWN_EMBEDDINGS,
            {"layer_output_scale.weight": "layer_scalar"},
        ),
        other_parts=MappingProxyType(_EMBEDDINGS_OF_LAYERS),
        differing=("feed_forward_length", "attention.head_count_kv"),
        settings=gemma4,
    ),
    "gemma": Architecture("GemmaForCausalLM", norms_plus_one=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        named(ATTENTION, MLP, FOUR_NORMS),
        norms_plus_one=True,
        settings=gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        named(ATTENTION, MLP, FOUR_NORMS),
        norms_plus_one=True,
        settings=gemma3,
    ),
}
