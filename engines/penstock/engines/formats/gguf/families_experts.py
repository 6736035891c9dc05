"""Mixtures of experts in GGUF files."""

from __future__ import annotations

from dataclasses import replace

from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    LLAMA,
    MIXTRAL_EXPERTS,
    ROUTED,
    TWO_NORMS,
    Architecture,
    Config,
    expert_size,
    experts,
    experts_in,
    experts_of_qwen,
    layer_types,
    named,
    ropes_by_kind,
    scales_of_granite,
    shared_in,
)
from penstock.engines.formats.gguf.container import FileSettings

_SHARED_GRANITE = "GraniteMoeSharedForCausalLM"


def mixtral(settings: FileSettings, config: Config) -> Config:
    return {**experts(settings, "num_local_experts"), "intermediate_size": expert_size(settings)}


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
        "intermediate_size": expert_size(settings),
        "norm_topk_prob": False,
        "clip_qkv": settings.get("attention.clamp_kqv"),
    }


def gpt_oss(settings: FileSettings, config: Config) -> Config:
    scaling = {"rope_scaling": {**config["rope_scaling"], "truncate": False}} if "rope_scaling" in config else {}
    return {
        **scaling,
        **experts(settings, "num_local_experts"),
        "intermediate_size": expert_size(settings),
        "sliding_window": settings.count("attention.sliding_window"),
    }


def granitemoe(settings: FileSettings, config: Config) -> Config:
    shared: Config = {}
    if settings.has("ffn_gate_shexp.weight"):
        size = settings.rows_of("ffn_gate_shexp")
        shared = {"architectures": [_SHARED_GRANITE], "shared_intermediate_size": size}
    return {
        **scales_of_granite(settings, config),
        **experts(settings, "num_local_experts"),
        "intermediate_size": expert_size(settings),
        **shared,
    }


def phimoe(settings: FileSettings, config: Config) -> Config:
    return {
        **experts(settings, "num_local_experts"),
        "intermediate_size": expert_size(settings),
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
        "intermediate_size": expert_size(settings),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": settings.count_or_zero("interleave_moe_layer_step"),
        "use_qk_norm": settings.get("expert_count") != _MAVERICK_EXPERTS,
    }


def mellum(settings: FileSettings, config: Config) -> Config:
    """Layers with windows do not stretch."""
    return {
        **experts_of_qwen(settings),
        **ropes_by_kind(settings, config, **config.get("rope_scaling", {})),
        "norm_topk_prob": True,
        "layer_types": layer_types(settings, config),
    }


_MAVERICK_EXPERTS = 128

ARCHITECTURES = {
    "llama4": Architecture(
        "Llama4ForCausalLM",
        named(
            ATTENTION,
            TWO_NORMS,
            FEED_FORWARD,
            {"ffn_gate_inp": "feed_forward.router"},
            shared_in("feed_forward.shared_expert"),
        ),
        experts_in("feed_forward.experts"),
        settings=llama4,
    ),
    "mellum": Architecture("MellumForCausalLM", ROUTED, EXPERTS, settings=mellum),
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
