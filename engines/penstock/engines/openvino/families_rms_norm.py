"""Families with RMSNorm, rotary attention with grouped heads and one gated MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engines.openvino.decoder_spec import LayerNorms, TensorNames
from penstock.engines.openvino.family import Family
from penstock.engines.openvino.layer_kinds import (
    LOGITS_CAP,
    SCORE_CAP,
    all_but_every_nth,
    every_layer,
    exaone4_rotates,
    exaone4_windows,
    gemma3_ropes,
    layers_with_rope,
    olmo3_ropes,
    partial_rope,
    positive,
    renamed,
    smollm3_windows,
    upper_layers,
)


def _norms_behind(c: Mapping[str, Any]) -> LayerNorms:
    return LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


_QWEN2 = Family(
    sliding_windows=upper_layers,
    qkv_bias=lambda c: True,
    o_bias=lambda c: False,
    defaults={
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
)

_GEMMA_DEFAULTS: dict[str, Any] = {
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_GEMMA = Family(
    sliding_windows=all_but_every_nth,
    activation_key="hidden_activation",
    query_scale=lambda c, head_dim: positive(c, "query_pre_attn_scalar") ** -0.5,
    embedding_scale=lambda c: math.sqrt(c["hidden_size"]),
    norms=lambda c: LayerNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    norm_offset=1.0,
    defaults=_GEMMA_DEFAULTS,
)

RMS_NORM_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        mlp_bias=lambda c: bool(c.get("mlp_bias")),
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        sliding_windows=every_layer,
        qkv_bias=lambda c: False,
        o_bias=lambda c: False,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": Family(
        sliding_windows=upper_layers,
        qk_norm=lambda c: "each head",
        defaults={
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        caps=True,
        defaults=_GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 2,
            "max_position_embeddings": 8192,
            SCORE_CAP: 50.0,
            LOGITS_CAP: 30.0,
        },
    ),
    "Gemma3ForCausalLM": replace(_GEMMA, ropes=gemma3_ropes, qk_norm=lambda c: "each head"),
    "GraniteForCausalLM": Family(
        mlp_bias=lambda c: bool(c.get("mlp_bias")),
        query_scale=lambda c, head_dim: positive(c, "attention_multiplier"),
        embedding_scale=lambda c: positive(c, "embedding_multiplier"),
        residual_scale=lambda c: positive(c, "residual_multiplier"),
        logits_scale=lambda c: 1 / positive(c, "logits_scaling"),
        defaults={
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        sliding_windows=smollm3_windows,
        rotates=layers_with_rope,
        mlp_bias=lambda c: bool(c.get("mlp_bias")),
        defaults={
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "Olmo2ForCausalLM": Family(
        norms=_norms_behind,
        qk_norm=lambda c: "all heads",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Family(
        sliding_windows=all_but_every_nth,
        ropes=olmo3_ropes,
        norms=_norms_behind,
        qk_norm=lambda c: "all heads",
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
    ),
    "ExaoneForCausalLM": Family(
        usual=lambda c: renamed(c, num_hidden_layers="num_layers"),
        activation_key="activation_function",
        eps_key="layer_norm_epsilon",
        norms=lambda c: LayerNorms("ln_1", "", "ln_2"),
        qkv_bias=lambda c: False,
        o_bias=lambda c: False,
        names=TensorNames(
            embedding="transformer.wte",
            layers="transformer.h",
            norm="transformer.ln_f",
            attention="attn.attention",
            o="out_proj",
            gate_up=("c_fc_0", "c_fc_1"),
            down="c_proj",
        ),
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 5e5,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "Exaone4ForCausalLM": Family(
        sliding_windows=exaone4_windows,
        rotates=exaone4_rotates,
        norms=_norms_behind,
        qkv_bias=lambda c: False,
        o_bias=lambda c: False,
        qk_norm=lambda c: "each head",
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Phi3ForCausalLM": Family(
        sliding_windows=every_layer,
        ropes=partial_rope,
        qkv_bias=lambda c: False,
        o_bias=lambda c: False,
        names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
}
