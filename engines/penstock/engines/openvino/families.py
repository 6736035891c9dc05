"""Which models can be run: config.json -> DecoderSpec.

All families here are the same decoder (RMSNorm, rotary attention with grouped heads, SwiGLU) with small differences; a
new one of that kind is a row of `FAMILIES`. Settings that change the computation and are not known here are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.rope import Rope, parse_rope


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of one decoder: all that its graph depends on, beside the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]
    """For each layer, how many tokens it attends to, the token itself included; 0: all before it."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class Family:
    """How one architecture reads its config.json."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a key means when config.json leaves it out, where the family's own default matters."""
    sliding_windows: Callable[[Mapping[str, Any]], list[int]] = lambda c: [0] * c["num_hidden_layers"]
    qkv_bias: Callable[[Mapping[str, Any]], bool] = lambda c: bool(c.get("attention_bias"))
    o_bias: Callable[[Mapping[str, Any]], bool] = lambda c: bool(c.get("attention_bias"))
    mlp_bias: Callable[[Mapping[str, Any]], bool] = lambda c: False
    qk_norm: bool = False


def _every_layer(c: Mapping[str, Any]) -> list[int]:
    return [c.get("sliding_window") or 0] * c["num_hidden_layers"]


def _upper_layers(c: Mapping[str, Any]) -> list[int]:
    """Qwen's rule: with use_sliding_window, the layers that layer_types names, or all from max_window_layers on."""
    layers = c["num_hidden_layers"]
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    kinds = c.get("layer_types")
    if kinds is None:
        return [window if n >= c["max_window_layers"] else 0 for n in range(layers)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise UnsupportedError(
            f"layer_types is not understood: {len(kinds)} entries for {layers} layers, {unknown or ''}"
        )
    if "sliding_attention" in kinds and not window:
        raise UnsupportedError("layer_types has sliding_attention, but no sliding window is switched on")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        mlp_bias=lambda c: bool(c.get("mlp_bias")),
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        sliding_windows=_every_layer,
        qkv_bias=lambda c: False,
        o_bias=lambda c: False,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "Qwen2ForCausalLM": Family(
        sliding_windows=_upper_layers,
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
        sliding_windows=_upper_layers,
        qk_norm=True,
        defaults={
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
}

_REFUSED = {
    "quantization_config": "quantized checkpoints",
    "text_config": "multimodal models",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
}


def parse_config(config: Mapping[str, Any]) -> DecoderSpec:
    """`config` is config.json. Raises UnsupportedError, naming what is not supported and what is."""
    family = _family(config)
    for key, meaning in _REFUSED.items():
        if config.get(key) is not None:
            raise UnsupportedError(f"config.json has {key}: {meaning} are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act={config['hidden_act']!r} is not supported; supported is silu")
    try:
        return _spec(family, {**family.defaults, **config})
    except KeyError as e:
        raise UnsupportedError(f"config.json lacks {e.args[0]!r}") from None


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
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
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    return DecoderSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=c.get("rms_norm_eps", 1e-6),
        max_position_embeddings=c["max_position_embeddings"],
        rope=parse_rope(c, head_dim),
        tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        sliding_windows=tuple(family.sliding_windows(c)),
        qkv_bias=family.qkv_bias(c),
        o_bias=family.o_bias(c),
        mlp_bias=family.mlp_bias(c),
        qk_norm=family.qk_norm,
    )
