"""Hybrids with Mamba-2's state spaces in GGUF files."""

from __future__ import annotations

from dataclasses import replace

from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    LLAMA,
    MLP,
    ROUTED,
    Architecture,
    Config,
    expert_groups,
    expert_size,
    experts,
    experts_of_deepseek,
    kinds_by_heads,
    named,
    of_experts,
    own_layers,
    scales_of_granite,
)
from penstock.engines.formats.gguf.container import FileSettings


def granitehybrid(settings: FileSettings, config: Config) -> Config:
    """Layers with attention have heads of keys. An MLP that every token has stands beside experts, or alone."""
    has_experts, rotates = bool(settings.get("expert_count")), settings.get("rope.scaling.finetuned")
    mixture = (
        {**experts(settings, "num_local_experts"), "intermediate_size": expert_size(settings)}
        if has_experts
        else {"num_local_experts": 0}
    )
    return {
        **scales_of_granite(settings, config),
        **mixture,
        **_state_space(settings),
        "shared_intermediate_size": settings.rows_of("ffn_gate_shexp" if has_experts else "ffn_gate"),
        "layer_types": kinds_by_heads(settings, config, "linear_attention"),
        "position_embedding_type": "rope" if rotates else "nope",
        "mamba_expand": settings.count("ssm.inner_size") // config["hidden_size"],
    }


def falcon_h1(settings: FileSettings, config: Config) -> Config:
    """Its many scales are in the matrices, and llama.cpp knows that the gate comes before the norm."""
    return {
        **_state_space(settings),
        "mamba_d_ssm": settings.count("ssm.inner_size"),
        "mamba_rms_norm": settings.some_layer_has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def nemotron_h(settings: FileSettings, config: Config) -> Config:
    """A layer without heads of keys and without an MLP is a state space."""
    depth, has_experts = own_layers(settings, config), bool(settings.get("expert_count"))
    layers = depth["num_hidden_layers"]
    heads, sizes = (settings.by_layer(name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    kinds = [
        "full_attention" if head else ("moe" if has_experts else "mlp") if size else "linear_attention"
        for head, size in zip(heads, sizes, strict=True)
    ]
    inner, state_heads = settings.count("ssm.inner_size"), settings.count("ssm.time_step_rank")
    return {
        **(_experts_of_nemotron(settings) if has_experts else {}),
        **depth,
        "layers_block_type": kinds,
        "layer_norm_epsilon": settings.number("attention.layer_norm_rms_epsilon", config["layer_norm_epsilon"]),
        "mamba_num_heads": state_heads,
        "mamba_head_dim": inner // state_heads,
        "n_groups": settings.count("ssm.group_count"),
        "ssm_state_size": settings.count("ssm.state_size"),
        "conv_kernel": settings.count("ssm.conv_kernel"),
        "use_conv_bias": settings.some_layer_has("ssm_conv1d.bias"),
        "attention_bias": settings.some_layer_has("attn_q.bias"),
        "mlp_bias": settings.some_layer_has("ffn_up.bias"),
    }


def _experts_of_nemotron(settings: FileSettings) -> Config:
    return {
        **experts_of_deepseek(settings),
        **expert_groups(settings),
        "moe_shared_expert_intermediate_size": settings.rows_of("ffn_up_shexp"),
        "moe_latent_size": settings.count_or_zero("moe_latent_size") or None,
        "norm_topk_prob": bool(settings.get("expert_weights_norm")),
    }


def _state_space(settings: FileSettings) -> Config:
    return {
        "mamba_n_heads": settings.count("ssm.time_step_rank"),
        "mamba_n_groups": settings.count("ssm.group_count"),
        "mamba_d_state": settings.count("ssm.state_size"),
        "mamba_d_conv": settings.count("ssm.conv_kernel"),
        "mamba_conv_bias": settings.some_layer_has("ssm_conv1d.bias"),
    }


_STATE_SPACE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_NEMOTRON = Architecture(
    "NemotronHForCausalLM",
    named(
        {part: name.replace("mamba.", "mixer.") for part, name in _STATE_SPACE.items()},
        {part: name.replace("self_attn.", "mixer.") for part, name in ATTENTION.items()},
        {"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"},
    ),
    embedding="model.embeddings",
    norm="model.norm_f",
    eps_key="layer_norm_epsilon",
    settings=nemotron_h,
)

ARCHITECTURES = {
    "granitehybrid": replace(
        LLAMA,
        hugging_face="GraniteMoeHybridForCausalLM",
        block_parts=named(ROUTED, MLP, _STATE_SPACE),
        expert_parts=EXPERTS,
        settings=granitehybrid,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        named(
            ATTENTION,
            _STATE_SPACE,
            FEED_FORWARD,
            {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm.weight"},  # its name has no kind
        ),
        norm="model.final_layernorm",
        settings=falcon_h1,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        block_parts=named(
            _NEMOTRON.block_parts,
            {
                "ffn_gate_inp": "mixer.gate",
                "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
                "ffn_up_shexp": "mixer.shared_experts.up_proj",
                "ffn_down_shexp": "mixer.shared_experts.down_proj",
                "ffn_latent_down": "mixer.fc1_latent_proj",
                "ffn_latent_up": "mixer.fc2_latent_proj",
            },
        ),
        expert_parts=of_experts(
            {"ffn_up": "mixer.experts.{}.up_proj", "ffn_down": "mixer.experts.{}.down_proj"},
        ),
    ),
}
