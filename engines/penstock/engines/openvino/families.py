"""Which models can be run: config.json -> DecoderSpec.

All families here are the same decoder (RMSNorm, rotary attention with grouped heads, a gated MLP) with small
differences; a new one of that kind is a row of `FAMILIES`. Settings that change the computation and are not known here
are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.kit.cache_size import check_model_sizes
from penstock.engines.openvino.decoder_spec import ACTIVATIONS, DecoderSpec, LayerNorms, QKNorm
from penstock.engines.openvino.layer_kinds import (
    all_but_every_nth,
    every_layer,
    every_layer_rotates,
    exaone4_rotates,
    exaone4_windows,
    gemma3_ropes,
    olmo3_ropes,
    one_rope,
    partial_rope,
    positive,
    smollm3_rotates,
    smollm3_windows,
    upper_layers,
)
from penstock.engines.openvino.rope import Rope, context_length


@dataclass(frozen=True)
class Family:
    """How one architecture reads its config.json."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a key means when config.json leaves it out, where the family's own default matters."""
    sliding_windows: Callable[[Mapping[str, Any]], list[int]] = lambda c: [0] * c["num_hidden_layers"]
    ropes: Callable[[Mapping[str, Any], int], tuple[Rope, Rope]] = one_rope
    """Of layers that attend to all tokens, and of layers with a window; the int is head_dim."""
    activation_key: str = "hidden_act"
    query_scale: Callable[[Mapping[str, Any], int], float] = lambda c, head_dim: head_dim**-0.5
    embedding_scale: Callable[[Mapping[str, Any]], float] = lambda c: 1.0
    norms: LayerNorms = field(default_factory=LayerNorms)
    norm_offset: float = 0.0
    qkv_bias: Callable[[Mapping[str, Any]], bool] = lambda c: bool(c.get("attention_bias"))
    o_bias: Callable[[Mapping[str, Any]], bool] = lambda c: bool(c.get("attention_bias"))
    mlp_bias: Callable[[Mapping[str, Any]], bool] = lambda c: False
    qk_norm: QKNorm = ""
    rotates: Callable[[Mapping[str, Any], list[int]], list[bool]] = every_layer_rotates
    """For each layer, whether queries and keys are rotated; the list has the windows."""
    residual_scale: Callable[[Mapping[str, Any]], float] = lambda c: 1.0
    logits_scale: Callable[[Mapping[str, Any]], float] = lambda c: 1.0
    fused: bool = False


_NORMS_BEHIND = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")

FAMILIES: dict[str, Family] = {
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
    "Qwen2ForCausalLM": Family(
        sliding_windows=upper_layers,
        qkv_bias=lambda c: True,
        o_bias=lambda c: False,
        defaults={
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
    ),
    "Qwen3ForCausalLM": Family(
        sliding_windows=upper_layers,
        qk_norm="each head",
        defaults={
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
    "Gemma3ForCausalLM": Family(
        sliding_windows=all_but_every_nth,
        ropes=gemma3_ropes,
        activation_key="hidden_activation",
        query_scale=lambda c, head_dim: positive(c, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=lambda c: math.sqrt(c["hidden_size"]),
        norms=LayerNorms(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        ),
        norm_offset=1.0,
        qk_norm="each head",
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
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
        rotates=smollm3_rotates,
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
        norms=_NORMS_BEHIND,
        qk_norm="all heads",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Family(
        sliding_windows=all_but_every_nth,
        ropes=olmo3_ropes,
        norms=_NORMS_BEHIND,
        qk_norm="all heads",
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Exaone4ForCausalLM": Family(
        sliding_windows=exaone4_windows,
        rotates=exaone4_rotates,
        norms=_NORMS_BEHIND,
        qkv_bias=lambda c: False,
        o_bias=lambda c: False,
        qk_norm="each head",
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
        fused=True,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
}

_REFUSED = {
    "text_config": "multimodal models",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "use_bidirectional_attention": "models that attend to later tokens",
}


def parse_config(config: Mapping[str, Any], max_model_len: int | None = None) -> DecoderSpec:
    """`config` is config.json; `max_model_len`, the longest context that is wanted. Raises UnsupportedError,
    naming what is not supported and what is."""
    family = _family(config)
    for key, meaning in _REFUSED.items():
        value = config.get(key)
        if value is not None and value is not False:
            raise UnsupportedError(f"config.json has {key}: {meaning} are not supported")
    parse_scheme(config)
    check_model_sizes(config)
    try:
        return _spec(family, {**family.defaults, **config, "max_model_len": max_model_len})
    except KeyError as e:
        raise UnsupportedError(f"config.json lacks {e.args[0]!r}") from None


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    remote = "; its own code (auto_map) is never run" if "auto_map" in config else ""
    raise UnsupportedError(
        f"architecture {', '.join(names) or 'unnamed'} is not supported by the openvino runner{remote}; "
        f"supported are {', '.join(FAMILIES)}"
    )


def _spec(family: Family, c: Mapping[str, Any]) -> DecoderSpec:
    heads = c["num_attention_heads"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    if not heads or 0 in [c[key] for key in sizes]:
        raise UnsupportedError(f"config.json has a 0 among num_attention_heads, {', '.join(sizes)}")
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    if heads % kv_heads or not head_dim or head_dim % 2:
        raise UnsupportedError(f"{heads} heads of size {head_dim} on {kv_heads} for keys and values do not go together")
    activation = c.get(family.activation_key, "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"{family.activation_key}={activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    windows = family.sliding_windows(c)
    rotates = family.rotates(c, windows)
    whole, windowed = family.ropes(c, head_dim)
    return DecoderSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive({"rms_norm_eps": 1e-6, **c}, "rms_norm_eps"),
        max_position_embeddings=context_length(c),
        ropes=tuple(
            (windowed if window else whole) if turns else None for window, turns in zip(windows, rotates, strict=True)
        ),
        tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        sliding_windows=tuple(windows),
        query_scale=family.query_scale(c, head_dim),
        activation=activation,
        embedding_scale=family.embedding_scale(c),
        norms=family.norms,
        norm_offset=family.norm_offset,
        qkv_bias=family.qkv_bias(c),
        o_bias=family.o_bias(c),
        mlp_bias=family.mlp_bias(c),
        qk_norm=family.qk_norm,
        residual_scale=family.residual_scale(c),
        logits_scale=family.logits_scale(c),
        fused=family.fused,
    )
