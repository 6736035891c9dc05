"""Which models can be run: config.json -> DecoderSpec.

All families here are the same decoder with differences that `Family` names; a new one is a row in one of the tables.
Settings that change the computation and are not known here are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.context_length import context_length
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.formats.text_part import TEXT_PARTS, text_settings
from penstock.engines.kit.cache_size import check_model_sizes
from penstock.engines.openvino.decoder_spec import Activation, DecoderSpec
from penstock.engines.openvino.families_experts import EXPERT_FAMILIES, gpt_oss_in_gguf
from penstock.engines.openvino.families_layer_norm import LAYER_NORM_FAMILIES
from penstock.engines.openvino.families_rms_norm import RMS_NORM_FAMILIES
from penstock.engines.openvino.family import Family
from penstock.engines.openvino.layer_kinds import CAPS, LOGITS_CAP, SCORE_CAP, cap_of, positive

FAMILIES: dict[str, Family] = {**RMS_NORM_FAMILIES, **EXPERT_FAMILIES, **LAYER_NORM_FAMILIES}
_IN_GGUF = {
    "GPT2LMHeadModel": replace(FAMILIES["GPT2LMHeadModel"], transposed=False),
    "GptOssForCausalLM": gpt_oss_in_gguf(FAMILIES["GptOssForCausalLM"]),
}
"""Families whose matrices are different ones in GGUF files, which config.json says by tensor_layout."""

_REFUSED = {
    "text_config": "multimodal models",
    SCORE_CAP: "soft-capped attention",
    LOGITS_CAP: "soft-capped logits",
    "use_bidirectional_attention": "models that attend to later tokens",
    "qk_layernorm": "norms of queries and keys in this family",
    "clip_qkv": "queries, keys and values with a limit",
    "scale_attn_by_inverse_layer_idx": "attention scaled by the layer",
    "add_cross_attention": "models that attend to an encoder",
    "apply_residual_connection_post_layernorm": "residuals behind the norm",
    "alibi": "ALiBi in this family",
}


def parse_config(config: Mapping[str, Any], max_model_len: int | None = None) -> DecoderSpec:
    """`config` is config.json; `max_model_len`, the longest context that is wanted. Raises UnsupportedError,
    naming what is not supported and what is."""
    config = text_settings(config)
    family = _family(config)
    for key, meaning in _REFUSED.items():
        value = config.get(key)
        if value is not None and value is not False and not (family.caps and key in CAPS):
            raise UnsupportedError(f"config.json has {key}: {meaning} are not supported")
    parse_scheme(config)
    check_model_sizes(config)
    try:
        config = {**family.defaults, **config}
        config.update(family.usual(config))
        check_model_sizes(config)
        return _spec(family, {**config, "max_model_len": max_model_len})
    except KeyError as e:
        raise UnsupportedError(f"config.json lacks {e.args[0]!r}") from None


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    families = {**FAMILIES, **_IN_GGUF} if config.get("tensor_layout") == "gguf" else FAMILIES
    for name in names:
        if name in families:
            return families[name]
    remote = "; its own code (auto_map) is never run" if "auto_map" in config else ""
    raise UnsupportedError(
        f"architecture {', '.join(names) or 'unnamed'} is not supported by the openvino runner{remote}; "
        f"supported are {', '.join((*FAMILIES, *TEXT_PARTS))}"
    )


def _spec(family: Family, c: Mapping[str, Any]) -> DecoderSpec:
    heads = c["num_attention_heads"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    for key in ("num_attention_heads", *sizes):
        if c[key] is None:
            raise KeyError(key)
    if not heads or 0 in [c[key] for key in sizes]:
        raise UnsupportedError(f"config.json has a 0 among num_attention_heads, {', '.join(sizes)}")
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    if heads % kv_heads or not head_dim or head_dim % 2:
        raise UnsupportedError(f"{heads} heads of size {head_dim} on {kv_heads} for keys and values do not go together")
    activation = c.get(family.activation_key, "silu")
    if activation not in get_args(Activation):
        raise UnsupportedError(
            f"{family.activation_key}={activation!r} is not supported; supported are {', '.join(get_args(Activation))}"
        )
    windows = family.sliding_windows(c)
    rotates = family.rotates(c, windows)
    whole, windowed = family.ropes(c, head_dim)
    ropes = tuple(
        (windowed if window else whole) if turns else None for window, turns in zip(windows, rotates, strict=True)
    )
    context = context_length(c, c["max_model_len"]) if any(ropes) else c["max_position_embeddings"]
    return DecoderSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=positive({family.eps_key: 1e-6, **c}, family.eps_key),
        max_position_embeddings=context or c["max_position_embeddings"],
        ropes=ropes,
        tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        sliding_windows=tuple(windows),
        query_scale=family.query_scale(c, head_dim),
        activation=activation,
        embedding_scale=family.embedding_scale(c),
        norms=family.norms(c),
        norm=family.norm,
        norm_offset=family.norm_offset,
        qkv_bias=family.qkv_bias(c),
        o_bias=family.o_bias(c),
        mlp_bias=family.mlp_bias(c),
        qk_norm=family.qk_norm(c),
        residual_scale=family.residual_scale(c),
        logits_scale=family.logits_scale(c),
        names=family.names,
        qkv_rows=family.qkv_rows,
        alternating_pairs=family.alternating_pairs,
        query_growth=family.query_growth(c),
        parallel=family.parallel(c),
        gated=family.gated,
        transposed=family.transposed,
        alibi=family.alibi,
        sinks=family.sinks,
        head_bias=family.head_bias,
        experts=family.experts(c),
        score_cap=cap_of(c, SCORE_CAP),
        logits_cap=cap_of(c, LOGITS_CAP),
    )
