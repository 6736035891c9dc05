"""Mixtures of experts in GGUF files."""

from __future__ import annotations

from dataclasses import replace

from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    LLAMA,
    MIXTRAL_EXPERTS,
    MLP,
    ROUTED,
    SHARED_EXPERTS,
    TWO_NORMS,
    USUAL_PATTERN,
    Architecture,
    Config,
    expert_groups,
    experts,
    experts_of_deepseek,
    experts_of_qwen,
    layer_types,
    named,
    of_experts,
    own_layers,
    scales_of_granite,
)
from penstock.engines.formats.gguf.container import FileSettings

_SHARED_GRANITE = "GraniteMoeSharedForCausalLM"


def mixtral(settings: FileSettings, config: Config) -> Config:
    return {**experts(settings, "num_local_experts"), "intermediate_size": settings.rows_of("ffn_gate_exps")}


def qwen2moe(settings: FileSettings, config: Config) -> Config:
    return {
        **experts_of_qwen(settings),
        "norm_topk_prob": False,
        "qkv_bias": config["attention_bias"],
        "shared_expert_intermediate_size": settings.rows_of("ffn_gate_shexp"),
    }


def qwen3moe(settings: FileSettings, config: Config) -> Config:
    return {**experts_of_qwen(settings), "norm_topk_prob": True}


def olmoe(settings: FileSettings, config: Config) -> Config:
    return {
        **experts(settings, "num_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "norm_topk_prob": False,
        "clip_qkv": settings.get("attention.clamp_kqv"),
    }


def gpt_oss(settings: FileSettings, config: Config) -> Config:
    scaling = {"rope_scaling": {**config["rope_scaling"], "truncate": False}} if "rope_scaling" in config else {}
    return {
        **scaling,
        **experts(settings, "num_local_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "sliding_window": settings.count("attention.sliding_window"),
    }


def ernie4_5_moe(settings: FileSettings, config: Config) -> Config:
    return {
        "use_bias": config["attention_bias"],
        "moe_num_experts": settings.count("expert_count"),
        "moe_k": settings.count("expert_used_count"),
        "moe_intermediate_size": settings.rows_of("ffn_gate_exps"),
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
        "moe_intermediate_size": settings.rows_of("ffn_gate_exps"),
        "num_dense_layers": settings.count_or_zero("leading_dense_block_count"),
        "route_scale": settings.number("expert_weights_scale", 1.0),
        "global_attn_every_n_layers": USUAL_PATTERN,
        "mup_enabled": True,
    }


def granitemoe(settings: FileSettings, config: Config) -> Config:
    shared: Config = {}
    if settings.has("ffn_gate_shexp.weight"):
        size = settings.rows_of("ffn_gate_shexp")
        shared = {"architectures": [_SHARED_GRANITE], "shared_intermediate_size": size}
    return {
        **scales_of_granite(settings, config),
        **experts(settings, "num_local_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        **shared,
    }


def phimoe(settings: FileSettings, config: Config) -> Config:
    return {
        **experts(settings, "num_local_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "lm_head_bias": "output.bias" in settings.tensors,
    }


def llama4(settings: FileSettings, config: Config) -> Config:
    """llama.cpp knows the chunks, how queries grow, and which size has no norms of queries and keys. A window of 0 says
    that no layer has chunks and all rotate."""
    whole: Config = {}
    if settings.get("attention.sliding_window") == 0:
        layers = config["num_hidden_layers"]
        whole = {"attention_chunk_size": None, "no_rope_layers": [1] * layers, "attn_temperature_tuning": False}
    return {
        **experts(settings, "num_local_experts"),
        **whole,
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": settings.count_or_zero("interleave_moe_layer_step"),
        "use_qk_norm": settings.get("expert_count") != _MAVERICK_EXPERTS,
    }


def hunyuan_moe(settings: FileSettings, config: Config) -> Config:
    return {
        "num_experts": settings.count("expert_count"),
        "moe_topk": settings.count("expert_used_count"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
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
    size = settings.rows_of("ffn_gate_exps")
    dense = sum(name.endswith(".ffn_gate.weight") for name in settings.tensors)
    return {
        **experts(settings, "num_experts"),
        **own_layers(settings, config),
        "moe_intermediate_size": size,
        "num_shared_experts": settings.rows_of("ffn_gate_shexp") // size,
        "first_k_dense_replace": dense,
        "router_scaling_factor": settings.number("expert_weights_scale", 1.0),
    }


def cohere2moe(settings: FileSettings, config: Config) -> Config:
    """Layers with windows rotate, and the dense ones in front."""
    depth = own_layers(settings, config)
    return {
        **experts(settings, "num_experts"),
        **depth,
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "prefix_dense_sliding_window_pattern": 1,
        "first_k_dense_replace": settings.count_or_zero("leading_dense_block_count"),
        "num_shared_experts": settings.count_or_zero("expert_shared_count"),
        "expert_selection_fn": "softmax" if settings.get("expert_gating_func") == _SOFTMAX else "sigmoid",
        "norm_topk_prob": bool(settings.get("expert_weights_norm")),
        "logit_scale": settings.number("logit_scale"),
        "layer_types": layer_types(settings, {**config, **depth}),
    }


_MAVERICK_EXPERTS = 128
_SOFTMAX = 1
"""llama.cpp's number for scores that are shares."""
_SHARED_MLP = {f"{part}_shexp": name.replace("mlp.", "mlp.shared_mlp.") for part, name in MLP.items()}
_FEED_FORWARD = {part: name.replace("mlp.", "feed_forward.") for part, name in MLP.items()}

ARCHITECTURES = {
    "llama4": Architecture(
        "Llama4ForCausalLM",
        named(
            ATTENTION,
            TWO_NORMS,
            _FEED_FORWARD,
            {"ffn_gate_inp": "feed_forward.router"},
            {
                f"{part}_shexp": name.replace("feed_forward.", "feed_forward.shared_expert.")
                for part, name in _FEED_FORWARD.items()
            },
        ),
        of_experts({part: name.replace("mlp.", "feed_forward.experts.{}.") for part, name in MLP.items()}),
        settings=llama4,
    ),
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
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", ROUTED, EXPERTS, settings=qwen2moe),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", ROUTED, EXPERTS, settings=qwen3moe),
    "olmoe": Architecture("OlmoeForCausalLM", ROUTED, EXPERTS, settings=olmoe),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        named(
            ATTENTION,
            {
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks.weight": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            },
        ),
        EXPERTS,
        settings=gpt_oss,
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
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        named(
            ATTENTION,
            TWO_NORMS,
            {
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
            },
        ),
        MIXTRAL_EXPERTS,
        settings=mixtral,
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
    "granitemoe": replace(
        LLAMA,
        hugging_face="GraniteMoeForCausalLM",
        block_parts=ROUTED,
        expert_parts=EXPERTS,
        others=(_SHARED_GRANITE,),
        settings=granitemoe,
    ),
    "phimoe": Architecture(
        "PhimoeForCausalLM",
        named(ATTENTION, TWO_NORMS, {"ffn_gate_inp": "block_sparse_moe.gate"}),
        MIXTRAL_EXPERTS,
        settings=phimoe,
    ),
}

MIXTRAL = replace(
    LLAMA,
    hugging_face="MixtralForCausalLM",
    block_parts=named(ATTENTION, TWO_NORMS, {"ffn_gate_inp": "block_sparse_moe.gate"}),
    expert_parts=MIXTRAL_EXPERTS,
    settings=mixtral,
)
"""It has LLaMA's name."""
