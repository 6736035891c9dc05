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
from penstock.engines.kit.cache_size import check_model_sizes
from penstock.engines.openvino.rope import Rope, parse_rope, parse_ropes_of_layer_types, settings_in

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Of the MLP's gate."""


@dataclass(frozen=True)
class LayerNorms:
    """What a layer's norms are called in the checkpoint; "": there is none in this place."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    """Before its output is added, as `after_mlp`."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


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
    ropes: tuple[Rope, ...]
    """For each layer; layers with the same angles have the same object."""
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]
    """For each layer, how many tokens it attends to, the token itself included; 0: all before it."""
    query_scale: float
    """Of the products of queries and keys."""
    activation: str
    """One of `ACTIVATIONS`."""
    embedding_scale: float
    """Of the embeddings, not of a head that is tied to them."""
    norms: LayerNorms
    norm_offset: float
    """Added to the weights of all norms."""
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
    ropes: Callable[[Mapping[str, Any], int], tuple[Rope, Rope]] = lambda c, head_dim: (parse_rope(c, head_dim),) * 2
    """Of layers that attend to all tokens, and of layers with a window; the int is head_dim."""
    activation_key: str = "hidden_act"
    query_scale: Callable[[Mapping[str, Any], int], float] = lambda c, head_dim: head_dim**-0.5
    embedding_scale: Callable[[Mapping[str, Any]], float] = lambda c: 1.0
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0
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
    if c.get("layer_types") is None:
        first = _count(c, "max_window_layers")
        return [window if n >= first else 0 for n in range(layers)]
    return _layers_by_type(c["layer_types"], layers, window)


def _all_but_every_sixth(c: Mapping[str, Any]) -> list[int]:
    """Gemma 3's rule: the layers that layer_types names, or all but each one that sliding_window_pattern ends at."""
    layers, window = c["num_hidden_layers"], c.get("sliding_window") or 0
    kinds = c.get("layer_types")
    if kinds is None:
        pattern = _count(c, "sliding_window_pattern") or layers + 1
        kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(layers)]
    return _layers_by_type(kinds, layers, window)


def _layers_by_type(kinds: Any, layers: int, window: int) -> list[int]:
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != layers:
        found = f"{len(kinds)} entries for {layers} layers" if known else str(kinds)[:200]
        raise UnsupportedError(
            f"layer_types is not understood: {found}; each layer has full_attention or sliding_attention"
        )
    if "sliding_attention" in kinds and not window:
        raise UnsupportedError("layer_types has sliding_attention, but no sliding window is switched on")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _gemma3_ropes(c: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    """Older configs scale the rotations of full attention only, and call the other base rope_local_base_freq."""
    whole = {"rope_theta": c.get("rope_theta") or 1e6, **settings_in(c, "rope_scaling")}
    windowed = {"rope_theta": c.get("rope_local_base_freq") or 1e4}
    ropes = parse_ropes_of_layer_types(c, head_dim, {"full_attention": whole, "sliding_attention": windowed})
    return ropes["full_attention"], ropes["sliding_attention"]


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
    "Gemma3ForCausalLM": Family(
        sliding_windows=_all_but_every_sixth,
        ropes=_gemma3_ropes,
        activation_key="hidden_activation",
        query_scale=lambda c, head_dim: _positive(c, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=lambda c: math.sqrt(c["hidden_size"]),
        norms=LayerNorms(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        ),
        norm_offset=1.0,
        qk_norm=True,
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
}

_REFUSED = {
    "quantization_config": "quantized checkpoints",
    "text_config": "multimodal models",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "use_bidirectional_attention": "models that attend to later tokens",
}


def parse_config(config: Mapping[str, Any]) -> DecoderSpec:
    """`config` is config.json. Raises UnsupportedError, naming what is not supported and what is."""
    family = _family(config)
    for key, meaning in _REFUSED.items():
        value = config.get(key)
        if value is not None and value is not False:
            raise UnsupportedError(f"config.json has {key}: {meaning} are not supported")
    check_model_sizes(config)
    try:
        return _spec(family, {**family.defaults, **config})
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
    windows = tuple(family.sliding_windows(c))
    whole, windowed = family.ropes(c, head_dim)
    return DecoderSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive({"rms_norm_eps": 1e-6, **c}, "rms_norm_eps"),
        max_position_embeddings=c["max_position_embeddings"],
        ropes=tuple(windowed if window else whole for window in windows),
        tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        sliding_windows=windows,
        query_scale=family.query_scale(c, head_dim),
        activation=activation,
        embedding_scale=family.embedding_scale(c),
        norms=family.norms,
        norm_offset=family.norm_offset,
        qkv_bias=family.qkv_bias(c),
        o_bias=family.o_bias(c),
        mlp_bias=family.mlp_bias(c),
        qk_norm=family.qk_norm,
    )


def _count(c: Mapping[str, Any], key: str) -> int:
    value = c[key]
    if type(value) is not int or value < 0:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is no number of layers")
    return value


def _positive(c: Mapping[str, Any], key: str) -> float:
    value = c[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is not a positive number")
    return float(value)
