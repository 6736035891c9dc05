"""Settings of config.json that only some architectures have, out of a GGUF file: (its settings, config.json without
them) -> what is added to config.json, or takes the place of what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.gguf.settings import FileSettings

Config = Mapping[str, Any]

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""The one size of Gemma 2, and of Gemma 3, that scales its queries by another number than head_dim."""
_USUAL_PATTERN = 4
"""Of OLMo 3 and EXAONE 4: each fourth layer attends to all tokens."""


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


def _gemma_scale(config: Config, layers_of_27b: int) -> int:
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scale: int = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return scale


def granite(settings: FileSettings, config: Config) -> Config:
    if settings.get("rope.scaling.finetuned") is False:
        raise UnsupportedError("the GGUF file has rope.scaling.finetuned=false: Granite without rotary embedding")
    return {
        "attention_multiplier": settings.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "logits_scaling": settings.number("logit_scale", 1.0),
    }


def smollm3(settings: FileSettings, config: Config) -> Config:
    return {"no_rope_layer_interval": 4}


def olmo2(settings: FileSettings, config: Config) -> Config:
    """OLMo 3 has the same name, and windows."""
    if "sliding_window" not in config:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "layer_types": _layer_types(settings, config)}


def exaone4(settings: FileSettings, config: Config) -> Config:
    if "sliding_window" not in config:
        return {"sliding_window": None}
    return {"layer_types": _layer_types(settings, config)}


def mixtral(settings: FileSettings, config: Config) -> Config:
    return {**_experts(settings, "num_local_experts"), "intermediate_size": settings.rows_of("ffn_gate_exps")}


def qwen2moe(settings: FileSettings, config: Config) -> Config:
    return {
        **_qwen(settings),
        "norm_topk_prob": False,
        "qkv_bias": config["attention_bias"],
        "shared_expert_intermediate_size": settings.rows_of("ffn_gate_shexp"),
    }


def qwen3moe(settings: FileSettings, config: Config) -> Config:
    return {**_qwen(settings), "norm_topk_prob": True}


def olmoe(settings: FileSettings, config: Config) -> Config:
    return {
        **_experts(settings, "num_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "norm_topk_prob": False,
        "clip_qkv": settings.get("attention.clamp_kqv"),
    }


def gpt_oss(settings: FileSettings, config: Config) -> Config:
    scaling = {"rope_scaling": {**config["rope_scaling"], "truncate": False}} if "rope_scaling" in config else {}
    return {
        **scaling,
        **_experts(settings, "num_local_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "sliding_window": settings.count("attention.sliding_window"),
    }


def stablelm(settings: FileSettings, config: Config) -> Config:
    return {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": not settings.has("ffn_norm.weight"),
        "qk_layernorm": settings.has("attn_q_norm.weight"),
    }


def starcoder2(settings: FileSettings, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def gpt2(settings: FileSettings, config: Config) -> Config:
    return {"n_inner": config["intermediate_size"]}


def gptneox(settings: FileSettings, config: Config) -> Config:
    parallel = settings.get("use_parallel_residual")
    return {
        "rotary_pct": config.get("partial_rotary_factor", 1.0),
        "rotary_emb_base": config["rope_theta"],
        "use_parallel_residual": parallel is None or bool(parallel),
    }


def falcon(settings: FileSettings, config: Config) -> Config:
    """Old layers have one head of keys, new ones have several, with one norm or two."""
    grouped = config["num_key_value_heads"] > 1
    return {
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if settings.has("attn_norm_2.weight") else 1,
        "bias": config["attention_bias"],
    }


def bloom(settings: FileSettings, config: Config) -> Config:
    return {"seq_length": config["max_position_embeddings"]}


def _qwen(settings: FileSettings) -> Config:
    return {**_experts(settings, "num_experts"), "moe_intermediate_size": settings.rows_of("ffn_gate_exps")}


def _experts(settings: FileSettings, name: str) -> Config:
    return {name: settings.count("expert_count"), "num_experts_per_tok": settings.count("expert_used_count")}


def _layer_types(settings: FileSettings, config: Config) -> list[str]:
    """By a list with an entry for each layer, or the number of layers from one without a window to the next."""
    layers, pattern = config["num_hidden_layers"], settings.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = settings.count("attention.sliding_window_pattern", _USUAL_PATTERN)
        pattern = [(n + 1) % every != 0 for n in range(layers)]
    if len(pattern) != layers:
        raise EngineError(f"the GGUF file has a pattern of windows for {len(pattern)} layers, and {layers} layers")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
