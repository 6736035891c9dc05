"""Hybrids with short convolutions or delta nets in GGUF files."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    MLP,
    NORMS_OF_SEED,
    ROUTED,
    USUAL_PATTERN,
    W_NAMES,
    Architecture,
    Config,
    experts_in,
    experts_of_qwen,
    kinds_by_heads,
    named,
    own_layers,
)
from penstock.engines.formats.gguf.container import FileSettings


def lfm2(settings: FileSettings, config: Config) -> Config:
    """Layers with a short convolution have no heads of keys."""
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": settings.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": kinds_by_heads(settings, config, "conv"),
    }


def lfm2moe(settings: FileSettings, config: Config) -> Config:
    return {
        **lfm2(settings, config),
        **experts_of_qwen(settings),
        "num_dense_layers": settings.count("leading_dense_block_count"),
        "use_expert_bias": settings.some_layer_has("exp_probs_b.bias"),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
    }


def qwen35(settings: FileSettings, config: Config) -> Config:
    heads = settings.count("ssm.time_step_rank")
    return {
        **own_layers(settings, config),
        "full_attention_interval": settings.count("full_attention_interval", USUAL_PATTERN),
        "linear_conv_kernel_dim": settings.count("ssm.conv_kernel"),
        "linear_key_head_dim": settings.count("ssm.state_size"),
        "linear_num_key_heads": settings.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": settings.count("ssm.inner_size") // heads,
    }


def qwen3next(settings: FileSettings, config: Config) -> Config:
    if settings.has("ssm_in.weight"):
        raise UnsupportedError("the GGUF file has ssm_in, of a converter from before 2026: a newer file has none")
    return {**qwen35moe(settings, config), "norm_topk_prob": True}


def qwen35moe(settings: FileSettings, config: Config) -> Config:
    shared = settings.rows_of("ffn_gate_shexp")
    return {**qwen35(settings, config), **experts_of_qwen(settings), "shared_expert_intermediate_size": shared}


_LFM2_PARTS = named(
    ATTENTION,
    {
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    },
)
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    _LFM2_PARTS,
    norm="model.embedding_norm",
    other_parts=MappingProxyType({"token_embd_norm": "model.embedding_norm"}),
    settings=lfm2,
)
_DELTA_NETS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    named(ATTENTION, MLP, NORMS_OF_SEED, _DELTA_NETS),
    norms_plus_one=True,
    settings=qwen35,
)
_QWEN35_EXPERTS = replace(
    _QWEN35,
    hugging_face="Qwen3_5MoeForCausalLM",
    block_parts=named(ROUTED, NORMS_OF_SEED, _DELTA_NETS),
    expert_parts=EXPERTS,
    settings=qwen35moe,
)
ARCHITECTURES = {
    "qwen3next": replace(_QWEN35_EXPERTS, hugging_face="Qwen3NextForCausalLM", settings=qwen3next),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_EXPERTS,
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        hugging_face="Lfm2MoeForCausalLM",
        block_parts=named(
            _LFM2_PARTS, {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"}
        ),
        expert_parts=experts_in("feed_forward.experts", W_NAMES),
        settings=lfm2moe,
    ),
}
