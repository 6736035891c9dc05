"""Hybrids in GGUF files: some of their layers keep a state in place of keys and values."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    LLAMA,
    MLP,
    NORMS_OF_SEED,
    ROUTED,
    USUAL_PATTERN,
    Architecture,
    Config,
    experts,
    experts_of_qwen,
    named,
    of_experts,
    scales_of_granite,
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
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in settings.tensors),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
    }


def qwen35(settings: FileSettings, config: Config) -> Config:
    heads, further = settings.count("ssm.time_step_rank"), settings.count("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": max(config["num_hidden_layers"] - further, 0),
        "num_nextn_predict_layers": further,
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


def granitehybrid(settings: FileSettings, config: Config) -> Config:
    """Layers with attention have heads of keys. An MLP that every token has stands beside experts, or alone."""
    inner = settings.count("ssm.inner_size")
    has_experts, rotates = bool(settings.get("expert_count")), settings.get("rope.scaling.finetuned")
    mixture = (
        {**experts(settings, "num_local_experts"), "intermediate_size": settings.rows_of("ffn_gate_exps")}
        if (has_experts)
        else {"num_local_experts": 0}
    )
    return {
        **scales_of_granite(settings, config),
        **mixture,
        "shared_intermediate_size": settings.rows_of("ffn_gate_shexp" if has_experts else "ffn_gate"),
        "layer_types": kinds_by_heads(settings, config, "linear_attention"),
        "position_embedding_type": "rope" if rotates else "nope",
        "mamba_n_heads": settings.count("ssm.time_step_rank"),
        "mamba_n_groups": settings.count("ssm.group_count"),
        "mamba_d_state": settings.count("ssm.state_size"),
        "mamba_d_conv": settings.count("ssm.conv_kernel"),
        "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in settings.tensors),
    }


def kinds_by_heads(settings: FileSettings, config: Config, recurrent: str) -> list[str]:
    """Of the layers: those without heads of keys are `recurrent`."""
    heads, layers = settings.get("attention.head_count_kv"), config["num_hidden_layers"]
    heads = heads if isinstance(heads, list) else [heads] * layers
    return [recurrent if number == 0 else "full_attention" for number in heads]


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
_STATE_SPACES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}

ARCHITECTURES = {
    "qwen3next": replace(_QWEN35_EXPERTS, hugging_face="Qwen3NextForCausalLM", settings=qwen3next),
    "granitehybrid": replace(
        LLAMA,
        hugging_face="GraniteMoeHybridForCausalLM",
        block_parts=named(ROUTED, MLP, _STATE_SPACES),
        expert_parts=EXPERTS,
        settings=granitehybrid,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_EXPERTS,
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        hugging_face="Lfm2MoeForCausalLM",
        block_parts=named(
            _LFM2_PARTS, {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"}
        ),
        expert_parts=of_experts(
            {part: f"feed_forward.experts.{{}}.{name}" for part, name in zip(MLP, ("w1", "w3", "w2"), strict=True)}
        ),
        settings=lfm2moe,
    ),
}
