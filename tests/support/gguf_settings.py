"""Settings of GGUF files, by the rules of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import gguf

from support.gguf_tensors import LATENT, global_head, size_of


def write_settings(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    heads, hidden = size_of(config, "num_attention_heads"), size_of(config, "hidden_size")
    writer.add_block_count(size_of(config, "num_hidden_layers"))
    writer.add_context_length(size_of(config, "max_position_embeddings"))
    writer.add_embedding_length(hidden)
    inner = config.get("intermediate_size") or config.get("n_inner") or config.get("moe_intermediate_size")
    writer.add_feed_forward_length(4 * hidden if family in ("bloom", "falcon", "gpt2") else inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_kv_heads" if family == "falcon" else "num_key_value_heads") or heads)
    if family in ("bloom", "gpt2", "gpt_neox"):
        writer.add_head_count_kv(heads)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if key in config:
            writer.add_layer_norm_eps(config[key])
    if family.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        heads_by_layer = _key_heads(config, config["layer_types"])
        write_value(writer, f"{writer.arch}.attention.head_count_kv", heads_by_layer)
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    if family == "olmo":
        writer.add_layer_norm_eps(1e-5)
    if config.get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(
            int(rope["partial_rotary_factor"] * (config.get("head_dim") or hidden // heads))
        )
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    _write_windows(writer, family, config)
    _write_experts(writer, config)
    for key, add in (
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("use_parallel_residual", writer.add_parallel_residual),
        ("logit_scale", writer.add_logit_scale),
        ("clip_qkv", writer.add_clamp_kqv),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("num_shared_experts", writer.add_expert_shared_count),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("route_scale", writer.add_expert_weights_scale),
        ("norm_topk_prob", writer.add_expert_weights_norm),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
    ):
        if config.get(key) is not None:
            add(config[key])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if rope.get("rope_type") == "longrope":
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(factor)
    if family in LATENT:
        _write_latent(writer, config)
    for key, value in (_OWN[family](config) if family in _OWN else {}).items():
        write_value(writer, f"{writer.arch}.{key}", value)


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Last among the sizes of heads, of which files have those of what is compressed, too."""
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    for name, value in (
        ("attention.key_length", config["kv_lora_rank"] + config["qk_rope_head_dim"]),
        ("attention.value_length", config["kv_lora_rank"]),
        ("attention.head_count_kv", 1),
        ("rope.dimension_count", config["qk_rope_head_dim"]),
    ):
        write_value(writer, f"{writer.arch}.{name}", value)
    if config.get("n_routed_experts"):
        sigmoids = config["model_type"] != "deepseek_v2"
        writer.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SIGMOID if sigmoids else gguf.ExpertGatingFuncType.SOFTMAX
        )
        writer.add_expert_group_count(config["n_group"] or 1)
        writer.add_expert_group_used_count(config["topk_group"] or 1)


def _gemma3n(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(share) if share else -math.inf for share in config["activation_sparsity_pattern"]
        ],
        **_windows_by_layer(config),
    }


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    layers = len(config["layer_types"])
    wide = [config["intermediate_size"]] * layers
    if config["use_double_wide_mlp"]:
        for n in range(1, config["num_kv_shared_layers"] + 1):
            wide[-n] *= 2
    size = config["moe_intermediate_size"]
    return {
        **({"expert_feed_forward_length": size} if config["enable_moe_block"] else {}),
        "attention.key_length": global_head(config),
        "rope.dimension_count": global_head(config),
        "attention.key_length_swa": config["head_dim"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": wide,
        **_windows_by_layer(config),
    }


def _windows_by_layer(config: dict[str, Any]) -> dict[str, Any]:
    ropes = config["rope_parameters"]
    own = {"rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"]} if "sliding_attention" in ropes else {}
    return {
        **own,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
    }


def _key_heads(config: dict[str, Any], kinds: list[str]) -> list[int]:
    """Layers of other kinds have none."""
    return [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds]


def _granite_hybrid(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_state_space(config, config["mamba_expand"] * config["hidden_size"]),
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
        "attention.head_count_kv": _key_heads(config, config["layer_types"]),
    }


def _falcon_h1(config: dict[str, Any]) -> dict[str, Any]:
    return _state_space(config, config["mamba_d_ssm"])


def _state_space(config: dict[str, Any], inner: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.group_count": config["mamba_n_groups"],
    }


def _nemotron_h(config: dict[str, Any]) -> dict[str, Any]:
    kinds, heads = config["layers_block_type"], config["mamba_num_heads"]
    inner = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
    latent = config["moe_latent_size"]
    return {
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": heads * config["mamba_head_dim"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.time_step_rank": heads,
        "ssm.group_count": config["n_groups"],
        "attention.head_count_kv": _key_heads(config, kinds),
        "feed_forward_length": [inner * (kind in ("mlp", "moe")) for kind in kinds],
        **({"moe_latent_size": latent} if latent else {}),
    }


def _llama4(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        **({"attention.sliding_window": 0} if config["attention_chunk_size"] is None else {}),
    }


def _hy_v3(config: dict[str, Any]) -> dict[str, Any]:
    return {"expert_weights_scale": config["router_scaling_factor"]}


def _exaone_moe(config: dict[str, Any]) -> dict[str, Any]:
    return {**_windows_by_layer(config), "nextn_predict_layers": 0, "rope.scaling.type": "none"}


def _cohere2_moe(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_windows_by_layer(config),
        "feed_forward_length": config["prefix_dense_intermediate_size"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SOFTMAX),
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
    }


def _minicpm(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_scale": config["scale_emb"],
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    }


def _minicpm3(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
    }


def _starcoder(config: dict[str, Any]) -> dict[str, Any]:
    return {"attention.head_count_kv": 1, "feed_forward_length": 4 * config["n_embd"]}


def _granite_swa(config: dict[str, Any]) -> dict[str, Any]:
    return {**_windows_by_layer(config), "attention.rope_pattern": [bool(base) for base in config["layer_rope_theta"]]}


_OWN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "llama4": _llama4,
    "hy_v3": _hy_v3,
    "exaone_moe": _exaone_moe,
    "cohere2_moe": _cohere2_moe,
    "minicpm": _minicpm,
    "minicpm3": _minicpm3,
    "gpt_bigcode": _starcoder,
    "mellum": _windows_by_layer,
    "granite_swa": _granite_swa,
}
"""By model_type: settings without the name of the architecture, of which some take the place of common ones."""


def _write_windows(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """Other converters leave them out."""
    families = ("gemma2", "gemma3", "olmo3", "exaone4", "gpt_oss", "phi3", "cohere2", "afmoe")
    if family not in families or not config.get("sliding_window"):
        return
    writer.add_sliding_window(config["sliding_window"])
    if family in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _write_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), None)
    if count and "moe" in config.get("layers_block_type", ["moe"]):
        writer.add_expert_count(count)
        names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
        used = next(config[name] for name in names if config.get(name))
        writer.add_expert_used_count(used[0] if isinstance(used, list) else used)


def write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_array(key, value)
