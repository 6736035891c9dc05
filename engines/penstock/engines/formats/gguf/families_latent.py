"""Models whose keys and values come out of compressed ones (MLA) in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    MLP,
    SHARED_EXPERTS,
    TWO_NORMS,
    Architecture,
    Config,
    expert_groups,
    experts_of_deepseek,
    named,
)
from penstock.engines.formats.gguf.container import FileSettings

_SIGMOID = 2
"""llama.cpp's number for scores that are sigmoids."""
_GLM47_FLASH_LAYERS, _GLM47_FLASH_TOKENS = (47, 48), 154880
"""The one model with sigmoids whose files may not say so."""
_LEGACY_WEIGHT = 0.1
"""By which llama.cpp's converter multiplies the weight of YaRN's factor in files of this architecture."""
_V3, _YOUTU = "DeepseekV3ForCausalLM", "YoutuForCausalLM"


def deepseek2(settings: FileSettings, config: Config) -> Config:
    """DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash; with dense layers alone, Youtu."""
    sizes = _sizes(settings, config)
    if not settings.get("expert_count"):
        return {**sizes, "architectures": [_YOUTU]}
    scores = settings.get("expert_gating_func")
    if scores is None and config["vocab_size"] == _GLM47_FLASH_TOKENS:
        scores = _SIGMOID if config["num_hidden_layers"] in _GLM47_FLASH_LAYERS else None
    normalized = bool(settings.get("expert_weights_norm"))
    groups = expert_groups(settings)
    mixture = {**experts_of_deepseek(settings), **groups, "norm_topk_prob": normalized}
    if scores == _SIGMOID:
        return {**sizes, **mixture, "architectures": [_V3]}
    return {**sizes, **mixture, "topk_method": "group_limited_greedy" if groups["n_group"] > 1 else "greedy"}


def _sizes(settings: FileSettings, config: Config) -> Config:
    """Newer files have the sizes of heads under names of their own, beside those of what is compressed."""
    rotated = settings.count("rope.dimension_count")
    head = settings.count("attention.key_length_mla", settings.count("attention.key_length"))
    rope, weight = config.get("rope_scaling"), settings.get("rope.scaling.yarn_log_multiplier")
    stretched: Mapping[str, object] = {}
    if rope and weight:
        weight = settings.number("rope.scaling.yarn_log_multiplier") / _LEGACY_WEIGHT
        stretched = {"rope_scaling": {**rope, "mscale": weight, "mscale_all_dim": weight}}
    return {
        **_ranks(settings),
        **stretched,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": settings.count("attention.value_length_mla", settings.count("attention.value_length")),
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": head,
        "partial_rotary_factor": 1.0,
    }


def minicpm3(settings: FileSettings, config: Config) -> Config:
    """llama.cpp knows its scales, which are those of config.json without them."""
    heads, head, rotated = (
        settings.count(name) for name in ("attention.head_count", "attention.key_length", "rope.dimension_count")
    )
    return {
        **_ranks(settings),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": settings.rows_of("attn_kv_b") // heads - (head - rotated),
        "partial_rotary_factor": 1.0,
    }


def _ranks(settings: FileSettings) -> Config:
    compressed = settings.get("attention.q_lora_rank")
    return {
        "q_lora_rank": None if compressed is None else settings.count("attention.q_lora_rank"),
        "kv_lora_rank": settings.count("attention.kv_lora_rank"),
    }


_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_ROUTER = {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}

ARCHITECTURES = {
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM",
        named(ATTENTION, MLP, TWO_NORMS, _LATENT),
        settings=minicpm3,
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        named(ATTENTION, MLP, TWO_NORMS, _LATENT, _ROUTER, SHARED_EXPERTS),
        EXPERTS,
        others=(_V3, _YOUTU, "Glm4MoeLiteForCausalLM"),
        settings=deepseek2,
    ),
}
