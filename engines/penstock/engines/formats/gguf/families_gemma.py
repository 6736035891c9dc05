"""Gemma in GGUF files."""

from __future__ import annotations

from statistics import NormalDist
from types import MappingProxyType

from penstock.engines.errors import EngineError
from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    FOUR_NORMS,
    MLP,
    Architecture,
    Config,
    experts_in,
    layer_types,
    named,
    ropes_by_kind,
)
from penstock.engines.formats.gguf.container import FileSettings

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""The one size of Gemma 2, and of Gemma 3, that scales its queries by another number than head_dim."""
_OWN_KV_LAYERS = 20
"""Layers of Gemma 3n before those that use the keys and values of others, where its file does not say it."""


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


def gemma3n(settings: FileSettings, config: Config) -> Config:
    """Of a layer's sparsity the file has the deviation below which values are 0, config.json their share."""
    layers, sizes = config["num_hidden_layers"], settings.get("feed_forward_length")
    deviations = settings.by_layer("activation_sparsity_scale", layers)
    if not all(isinstance(deviation, float) for deviation in deviations):
        raise EngineError("the GGUF file has no list of numbers gemma3n.activation_sparsity_scale")
    shared = settings.get("attention.shared_kv_layers")
    return {
        **_embeddings_of_layers(settings, config),
        **ropes_by_kind(settings, config),
        "layer_types": layer_types(settings, config),
        "intermediate_size": sizes if isinstance(sizes, list) else config["intermediate_size"],
        "activation_sparsity_pattern": [NormalDist().cdf(deviation) for deviation in deviations],
        "num_kv_shared_layers": max(layers - _OWN_KV_LAYERS, 0) if shared is None else shared,
        "altup_num_inputs": settings.count("altup.num_inputs"),
        "altup_active_idx": settings.get("altup.active_idx") or 0,
        "laurel_rank": settings.rows_of("laurel_l"),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
    }


def gemma4(settings: FileSettings, config: Config) -> Config:
    """Layers without a window have heads of another size, and those of them that rotate nowhere are in the file as
    divisors that leave no angle."""
    kinds, wide = layer_types(settings, config), settings.get("feed_forward_length")
    heads = settings.get("attention.head_count_kv")
    by_kind = dict(zip(kinds, heads, strict=False)) if isinstance(heads, list) else dict.fromkeys(kinds, heads)
    divisors = config.get("rope_scaling", {}).get("divisors") or [1.0]
    rotated = sum(divisor < _NO_ANGLE for divisor in divisors) / len(divisors)
    return {
        **_experts_of_gemma4(settings),
        **_embeddings_of_layers(settings, config),
        **ropes_by_kind(settings, config, rope_type="proportional", partial_rotary_factor=rotated),
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
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
    }


def _embeddings_of_layers(settings: FileSettings, config: Config) -> Config:
    own, table = settings.get("embedding_length_per_layer_input"), settings.tensors.get("per_layer_token_embd.weight")
    return {
        "hidden_size_per_layer_input": own or 0,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else config["vocab_size"],
    }


def _experts_of_gemma4(settings: FileSettings) -> Config:
    if not settings.get("expert_count"):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": settings.count("expert_count"),
        "top_k_experts": settings.count("expert_used_count"),
        "moe_intermediate_size": settings.count("expert_feed_forward_length"),
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
_ALTUP = {
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_EMBEDDINGS_OF_LAYERS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_BESIDE_EXPERTS = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}

ARCHITECTURES = {
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        named(ATTENTION, MLP, FOUR_NORMS, _OWN_EMBEDDINGS, _ALTUP),
        other_parts=named(
            _EMBEDDINGS_OF_LAYERS,
            {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
        ),
        differing=("feed_forward_length",),
        settings=gemma3n,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        named(
            ATTENTION,
            MLP,
            FOUR_NORMS,
            _OWN_EMBEDDINGS,
            _BESIDE_EXPERTS,
            {"layer_output_scale.weight": "layer_scalar"},
        ),
        experts_in("experts"),
        other_parts=MappingProxyType(_EMBEDDINGS_OF_LAYERS),
        differing=("feed_forward_length", "attention.head_count_kv"),
        others=("Gemma4UnifiedForCausalLM",),
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
