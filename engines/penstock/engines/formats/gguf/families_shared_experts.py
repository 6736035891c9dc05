"""Mixtures of experts with some that every token has, or that score as DeepSeek's, in GGUF files."""

from __future__ import annotations

from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    MLP,
    SHARED_EXPERTS,
    TWO_NORMS,
    USUAL_PATTERN,
    Architecture,
    Config,
    expert_groups,
    expert_size,
    experts,
    experts_of_deepseek,
    layer_types,
    named,
    own_layers,
    shared_in,
)
from penstock.engines.formats.gguf.container import FileSettings


def ernie4_5_moe(settings: FileSettings, config: Config) -> Config:
    return {
        "use_bias": config["attention_bias"],
        "moe_num_experts": settings.count("expert_count"),
        "moe_k": settings.count("expert_used_count"),
        "moe_intermediate_size": expert_size(settings),
        "moe_num_shared_experts": settings.count_or_zero("expert_shared_count"),
        "moe_layer_interval": settings.count("interleave_moe_layer_step", 1),
        "moe_layer_start_index": settings.count_or_zero("leading_dense_block_count"),
    }


def glm4moe(settings: FileSettings, config: Config) -> Config:
    return {
        **own_layers(settings, config),
        "use_qk_norm": settings.has("attn_q_norm.weight"),
        **experts_of_deepseek(settings),
        "norm_topk_prob": settings.get("expert_weights_norm") is not False,
    }


def dots1(settings: FileSettings, config: Config) -> Config:
    """The file does not say windows, which published models do not have."""
    return {
        **experts_of_deepseek(settings),
        "norm_topk_prob": bool(settings.get("expert_weights_norm")),
        "use_sliding_window": False,
    }


def afmoe(settings: FileSettings, config: Config) -> Config:
    """llama.cpp knows the scale of the embeddings, and which layers have windows."""
    return {
        **experts(settings, "num_experts"),
        "num_shared_experts": settings.count_or_zero("expert_shared_count"),
        "moe_intermediate_size": expert_size(settings),
        "num_dense_layers": settings.count_or_zero("leading_dense_block_count"),
        "route_scale": settings.number("expert_weights_scale", 1.0),
        "global_attn_every_n_layers": USUAL_PATTERN,
        "mup_enabled": True,
    }


def hunyuan_moe(settings: FileSettings, config: Config) -> Config:
    return {
        "num_experts": settings.count("expert_count"),
        "moe_topk": settings.count("expert_used_count"),
        "intermediate_size": expert_size(settings),
    }


def exaone_moe(settings: FileSettings, config: Config) -> Config:
    depth, mixture = own_layers(settings, config), experts_of_deepseek(settings)
    return {
        **mixture,
        **depth,
        **expert_groups(settings),
        "num_experts": mixture["n_routed_experts"],
        "num_shared_experts": mixture["n_shared_experts"],
        "norm_topk_prob": bool(settings.get("expert_weights_norm")),
        "layer_types": layer_types(settings, {**config, **depth}),
    }


def hy_v3(settings: FileSettings, config: Config) -> Config:
    """The dense layers in front are those with matrices of their own."""
    size = expert_size(settings)
    dense = sum(name.endswith(".ffn_gate.weight") for name in settings.tensors)
    return {
        **experts(settings, "num_experts"),
        **own_layers(settings, config),
        "moe_intermediate_size": size,
        "num_shared_experts": settings.rows_of("ffn_gate_shexp") // max(size, 1),
        "first_k_dense_replace": dense,
        "router_scaling_factor": settings.number("expert_weights_scale", 1.0),
    }


def cohere2moe(settings: FileSettings, config: Config) -> Config:
    """Layers with windows rotate, and the dense ones in front."""
    depth = own_layers(settings, config)
    return {
        **experts(settings, "num_experts"),
        **depth,
        "intermediate_size": expert_size(settings),
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "prefix_dense_sliding_window_pattern": 1,
        "first_k_dense_replace": settings.count_or_zero("leading_dense_block_count"),
        "num_shared_experts": settings.count_or_zero("expert_shared_count"),
        "expert_selection_fn": "softmax" if settings.get("expert_gating_func") == _SOFTMAX else "sigmoid",
        "norm_topk_prob": bool(settings.get("expert_weights_norm")),
        "logit_scale": settings.number("logit_scale"),
        "layer_types": layer_types(settings, {**config, **depth}),
    }


_SOFTMAX = 1
"""llama.cpp's number for scores that are shares."""
_SHARED_MLP = shared_in("mlp.shared_mlp")

ARCHITECTURES = {
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        named(
            ATTENTION,
            TWO_NORMS,
            {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
            {"ffn_gate_inp": "mlp.gate.wg"},
            _SHARED_MLP,
        ),
        EXPERTS,
        settings=hunyuan_moe,
    ),
    "hy_v3": Architecture(
        "HYV3ForCausalLM",
        named(
            ATTENTION,
            MLP,
            TWO_NORMS,
            {"ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias"},  # its name has no kind
            _SHARED_MLP,
        ),
        EXPERTS,
        settings=hy_v3,
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        named(
            ATTENTION,
            MLP,
            TWO_NORMS,
            {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.e_score_correction_bias"},
            SHARED_EXPERTS,
        ),
        EXPERTS,
        settings=exaone_moe,
    ),
    "cohere2moe": Architecture(
        "Cohere2MoeForCausalLM",
        named(ATTENTION, MLP, {"attn_norm": "input_layernorm", "ffn_gate_inp": "mlp.gate"}, SHARED_EXPERTS),
        EXPERTS,
        eps_key="layer_norm_eps",
        settings=cohere2moe,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        named(
            ATTENTION,
            MLP,
            {
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.gate",
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            },
            SHARED_EXPERTS,
        ),
        EXPERTS,
        settings=glm4moe,
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        named(
            ATTENTION,
            MLP,
            TWO_NORMS,
            {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
            SHARED_EXPERTS,
        ),
        EXPERTS,
        settings=dots1,
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        named(
            ATTENTION,
            MLP,
            {
                "attn_gate": "self_attn.gate_proj",
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b.bias": "mlp.expert_bias",
            },
            SHARED_EXPERTS,
        ),
        EXPERTS,
        settings=afmoe,
    ),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        named(
            ATTENTION,
            MLP,
            TWO_NORMS,
            {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
            SHARED_EXPERTS,
        ),
        EXPERTS,
        settings=ernie4_5_moe,
    ),
}
