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
    experts,
    experts_of_deepseek,
    experts_of_qwen,
    named,
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
        "moe_num_shared_experts": settings.count("expert_shared_count", 0),
        "moe_layer_interval": settings.count("interleave_moe_layer_step", 1),
        "moe_layer_start_index": settings.count("leading_dense_block_count", 0),
    }


def glm4moe(settings: FileSettings, config: Config) -> Config:
    """Its blocks are layers, and behind them those for multi-token prediction."""
    further = settings.count("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": max(config["num_hidden_layers"] - further, 0),
        "num_nextn_predict_layers": further,
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
        "num_shared_experts": settings.count("expert_shared_count", 0),
        "moe_intermediate_size": settings.rows_of("ffn_gate_exps"),
        "num_dense_layers": settings.count("leading_dense_block_count", 0),
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


ARCHITECTURES = {
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
