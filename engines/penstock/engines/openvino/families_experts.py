"""Families with mixtures of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import Clamp, Experts, QueryGrowth, TensorNames
from penstock.engines.openvino.family import Family
from penstock.engines.openvino.layer_kinds import (
    count,
    every_layer,
    layers_by_type,
    layers_with_rope,
    positive,
    upper_layers,
)

_MOST_EXPERTS = 1024
_LARGEST_EXPERT = 1 << 20


def _mixtral(c: Mapping[str, Any]) -> Experts:
    return _experts(c, c["intermediate_size"], [True] * c["num_hidden_layers"], normalized=True)


def _olmoe(c: Mapping[str, Any]) -> Experts:
    return _experts(c, c["intermediate_size"], [True] * c["num_hidden_layers"], bool(c["norm_topk_prob"]))


def _qwen(c: Mapping[str, Any]) -> Experts:
    """Of every decoder_sparse_step-th layer, without those of mlp_only_layers."""
    step, dense = count(c, "decoder_sparse_step"), c.get("mlp_only_layers") or []
    if not step or not isinstance(dense, list):
        raise UnsupportedError("config.json's decoder_sparse_step and mlp_only_layers are not understood")
    layers = [n not in dense and (n + 1) % step == 0 for n in range(c["num_hidden_layers"])]
    return _experts(c, _size(c, "moe_intermediate_size"), layers, bool(c["norm_topk_prob"]))


def _qwen2(c: Mapping[str, Any]) -> Experts:
    found = _qwen(c)
    return Experts(**{**vars(found), "shared_intermediate_size": _size(c, "shared_expert_intermediate_size")})


def _gpt_oss(c: Mapping[str, Any]) -> Experts:
    found = _mixtral(c)
    clamp = Clamp(positive(c, "swiglu_alpha"), positive(c, "swiglu_limit"))
    return Experts(**{**vars(found), "bias": True, "transposed": True, "clamp": clamp})


def _llama4(c: Mapping[str, Any]) -> Experts | None:
    """Of the layers in moe_layers; without it, of each one that interleave_moe_layer_step ends at."""
    given, number = c.get("moe_layers"), c["num_hidden_layers"]
    if given is None:
        step = count(c, "interleave_moe_layer_step") or number + 1
        given = range(step - 1, number, step)
    elif not isinstance(given, list) or not all(type(n) is int and 0 <= n < number for n in given):
        raise UnsupportedError(f"moe_layers is not understood: {str(given)[:100]}; it has numbers of layers")
    if not given:
        return None
    size = _size(c, "moe_intermediate_size")
    found = _experts(c, size, [n in given for n in range(number)], normalized=False)
    return replace(found, transposed=True, shared_intermediate_size=size, gated_share=False, weighs_inputs=True)


def _llama4_usual(c: Mapping[str, Any]) -> dict[str, Any]:
    """intermediate_size is that of experts there. Layers that rotate attend to nothing before their own chunk of the
    context, so it ends with the first one."""
    chunk = count(c, "attention_chunk_size") if c.get("attention_chunk_size") is not None else 0
    context = c["max_position_embeddings"]
    return {
        "intermediate_size": c["intermediate_size_mlp"],
        "moe_intermediate_size": c["intermediate_size"],
        "max_position_embeddings": min(context, chunk or context),
    }


def _llama4_growth(c: Mapping[str, Any]) -> QueryGrowth | None:
    if not c["attn_temperature_tuning"]:
        return None
    every = c["floor_scale"]
    if type(every) is not int or every < 1:
        raise UnsupportedError(f"config.json has floor_scale={str(every)[:50]}, which is no number of tokens")
    return QueryGrowth(every, positive(c, "attn_scale"))


def gpt_oss_in_gguf(family: Family) -> Family:
    """Gate and up are two matrices there, and all are [out, in]."""
    return replace(
        family,
        names=TensorNames(router="router"),
        experts=lambda c: replace(_gpt_oss(c), transposed=False),
    )


def _gpt_oss_windows(c: Mapping[str, Any]) -> list[int]:
    """Of the layers that layer_types names, or of every other one, from the first."""
    layers, kinds = c["num_hidden_layers"], c.get("layer_types")
    every_other = ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)]
    return layers_by_type(kinds or every_other, layers, c.get("sliding_window") or 0)


def _gpt_oss_usual(c: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": c.get("rope_parameters") or c.get("rope_scaling") or _GPT_OSS_ROPE}


def _experts(c: Mapping[str, Any], size: int, layers: list[bool], normalized: bool) -> Experts:
    number = c.get("num_local_experts") or c.get("num_experts") or 0
    chosen = c["num_experts_per_tok"]
    if not all(type(each) is int for each in (number, chosen)) or not 0 < chosen <= number <= _MOST_EXPERTS:
        raise UnsupportedError(f"config.json chooses {str(chosen)[:20]} of {str(number)[:20]} experts")
    return Experts(number, chosen, size, normalized, tuple(layers))


def _size(c: Mapping[str, Any], key: str) -> int:
    value = c[key]
    if type(value) is not int or not 0 < value <= _LARGEST_EXPERT:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is no size of an expert")
    return value


def _named_windows(c: Mapping[str, Any]) -> list[int]:
    """Those of layer_types: what a config without it means has changed over time."""
    if c.get("use_sliding_window") and c.get("layer_types") is None:
        raise UnsupportedError("use_sliding_window without layer_types is not supported in Qwen2-MoE")
    return upper_layers(c)


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_QWEN_DEFAULTS = {
    "sliding_window": 4096,
    "max_window_layers": 28,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}

EXPERT_FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Family(
        sliding_windows=every_layer,
        qkv_bias=lambda c: False,
        o_bias=lambda c: False,
        experts=_mixtral,
        names=TensorNames(mlp="block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        sliding_windows=_named_windows,
        qkv_bias=lambda c: bool(c["qkv_bias"]),
        o_bias=lambda c: False,
        experts=_qwen2,
        defaults={
            **_QWEN_DEFAULTS,
            "qkv_bias": True,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        sliding_windows=lambda c: every_layer(c) if c.get("use_sliding_window") else [0] * c["num_hidden_layers"],
        qk_norm=lambda c: "each head",
        experts=_qwen,
        defaults={
            **_QWEN_DEFAULTS,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "OlmoeForCausalLM": Family(
        qk_norm=lambda c: "all heads",
        experts=_olmoe,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "GptOssForCausalLM": Family(
        sliding_windows=_gpt_oss_windows,
        usual=_gpt_oss_usual,
        sinks=True,
        experts=_gpt_oss,
        names=TensorNames(router="router", gate_up=("gate_up_proj",)),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
    "Llama4ForCausalLM": Family(
        usual=_llama4_usual,
        rotates=layers_with_rope,
        alternating_pairs=True,
        qk_norm=lambda c: "each head, weightless" if c["use_qk_norm"] else "",
        query_growth=_llama4_growth,
        experts=_llama4,
        names=TensorNames(mlp="feed_forward", router="router", expert_gate_up=("gate_up_proj",)),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    ),
}
