"""Parts of families of decoders: config.json's usual settings as a plain decoder, and changes to its layers.

A family is a function from config.json to a `DecoderSpec`. Most take the plain decoder, or another family's, and change
fields of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_settings import context_length
from penstock.engines.kit.cache_size import check_model_sizes
from penstock.engines.openvino.decoder_spec import (
    MLP,
    Activation,
    Attention,
    DecoderSpec,
    Experts,
    LayerSpec,
    QueryGrowth,
)
from penstock.engines.openvino.rope import Rope, parse_rope

Settings = Mapping[str, Any]
"""config.json, with `max_model_len` as the longest context that is wanted."""
ReadSettings = Callable[[Settings], DecoderSpec]


class DecoderFamily(NamedTuple):
    read: ReadSettings
    """Raises UnsupportedError, or KeyError for a setting that is missing."""
    known: Sequence[str] = ()
    """Settings that it reads, and that are refused in others."""


FAMILIES: dict[str, DecoderFamily] = {}
"""By architecture."""

SCORE_CAP, LOGITS_CAP = CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
LIMIT = "clip_qkv"
_LARGEST_PART = 1 << 16


def family(*architectures: str, known: Sequence[str] = ()) -> Callable[[ReadSettings], ReadSettings]:
    """A decorator: the function reads config.json of these architectures. `known`: as `DecoderFamily.known`."""

    def register(function: ReadSettings) -> ReadSettings:
        FAMILIES.update(dict.fromkeys(architectures, DecoderFamily(function, known)))
        return function

    return register


def filled(c: Settings, **defaults: Any) -> Settings:
    """With what a setting means when config.json leaves it out. A family that is made of another one fills in its own
    defaults first."""
    return {**defaults, **c}


def renamed(c: Settings, **names: str) -> Settings:
    """With settings under their usual names that the family has under names of its own."""
    return changed(c, {usual: c[name] if c.get(name) is not None else c[usual] for usual, name in names.items()})


def changed(c: Settings, usual: Settings) -> Settings:
    """With `usual` in place of what is there. Raises UnsupportedError for sizes that no model has."""
    c = {**c, **usual}
    check_model_sizes(c)
    return c


def in_gguf(c: Settings) -> bool:
    """Whether the settings are of a GGUF file, where some families have other matrices."""
    return bool(c.get("tensor_layout") == "gguf")


def plain(
    c: Settings,
    *,
    activation_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
    rotates: bool = True,
    may_be_partial: bool = False,
) -> DecoderSpec:
    """The decoder that config.json's usual settings describe: rotary attention to all tokens, with grouped heads, one
    gated MLP, and an RMS norm before each. `rotates`: all layers do so alike. `may_be_partial`: only a part of each
    head may be rotated."""
    check_model_sizes(c, alike=True)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    for key in ("num_attention_heads", *sizes):
        if c[key] is None:
            raise KeyError(key)
    heads = c["num_attention_heads"]
    if not heads or 0 in [c[key] for key in sizes]:
        raise UnsupportedError(f"config.json has a 0 among num_attention_heads, {', '.join(sizes)}")
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    if heads % kv_heads or not head_dim or head_dim % 2:
        raise UnsupportedError(f"{heads} heads of size {head_dim} on {kv_heads} for keys and values do not go together")
    activation = c.get(activation_key, "silu")
    if activation not in get_args(Activation):
        raise UnsupportedError(
            f"{activation_key}={activation!r} is not supported; supported are {', '.join(get_args(Activation))}"
        )
    bias = bool(c.get("attention_bias"))
    rope = parse_rope(c, head_dim, may_be_partial=may_be_partial) if rotates else None
    attention = Attention(
        heads, kv_heads, head_dim, head_dim**-0.5, rope, qkv_bias=bias, o_bias=bias, score_cap=_cap(c, SCORE_CAP)
    )
    return DecoderSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        norm_eps=positive({eps_key: 1e-6, **c}, eps_key),
        max_position_embeddings=_stretched(c) if rotates else c["max_position_embeddings"],
        layers=(LayerSpec(attention, MLP(c["intermediate_size"], activation)),) * c["num_hidden_layers"],
        tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
        logits_cap=_cap(c, LOGITS_CAP),
    )


def changed_layers(spec: DecoderSpec, changes: Sequence[Mapping[str, Any]]) -> DecoderSpec:
    """Fields of attention changed in each layer that has some."""
    layers = list(spec.layers)
    for (n, attention), fields in zip(spec.attention.items(), changes, strict=True):
        layers[n] = replace(layers[n], mixer=replace(attention, **fields))
    return replace(spec, layers=tuple(layers))


def windowed(spec: DecoderSpec, windows: Sequence[int]) -> DecoderSpec:
    """`windows`: `Attention.window` of each layer."""
    return changed_layers(spec, [{"window": window} for window in windows])


def rotated_by_window(spec: DecoderSpec, c: Settings, ropes: Mapping[str, Rope]) -> DecoderSpec:
    """`ropes`: of layers with full_attention, and with sliding_attention."""
    kinds = [ropes["sliding_attention" if window else "full_attention"] for window in spec.windows]
    return rotated(replace(spec, max_position_embeddings=_stretched(c)), kinds)


def rotating(spec: DecoderSpec, c: Settings, rotates: Sequence[bool]) -> DecoderSpec:
    """Of layers that rotate, those for which `rotates` says so. If none does, RoPE's settings stretch no context."""
    if not any(rotates):
        spec = replace(spec, max_position_embeddings=c["max_position_embeddings"])
    return rotated(spec, [rope if turns else None for rope, turns in zip(spec.ropes, rotates, strict=True)])


def rotated(spec: DecoderSpec, ropes: Sequence[Rope | None]) -> DecoderSpec:
    """`ropes`: `Attention.rope` of each layer."""
    return changed_layers(spec, [{"rope": rope} for rope in ropes])


def growing(spec: DecoderSpec, growth: QueryGrowth, layers: Sequence[bool]) -> DecoderSpec:
    """Queries of the chosen layers grow."""
    return changed_layers(spec, [{"growth": growth} if grows else {} for grows in layers])


def mixed(spec: DecoderSpec, experts: Experts, layers: Sequence[bool] | None = None) -> DecoderSpec:
    """With experts in place of MLPs in those `layers`; None: in all."""
    if layers is None:
        return spec.with_layers(mlp=experts)
    chosen = zip(spec.layers, layers, strict=True)
    return replace(spec, layers=tuple(replace(layer, mlp=experts) if has else layer for layer, has in chosen))


def with_limit(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    """OLMo's limit of queries, keys and values."""
    return spec if c.get(LIMIT) is None else spec.with_attention(limit=positive(c, LIMIT))


def every_layer(c: Settings) -> list[int]:
    """Windows: the same in every layer."""
    return [c.get("sliding_window") or 0] * c["num_hidden_layers"]


def upper_layers(c: Settings) -> list[int]:
    """Qwen's windows: with use_sliding_window, in the layers that layer_types names, or in all from max_window_layers
    on."""
    layers = c["num_hidden_layers"]
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    if c.get("layer_types") is None:
        first = count(c, "max_window_layers")
        return [window if n >= first else 0 for n in range(layers)]
    return layers_by_type(c["layer_types"], layers, window)


def all_but_every_nth(c: Settings) -> list[int]:
    """Windows of Gemma and OLMo 3: in the layers that layer_types names, or in all but each one that
    sliding_window_pattern ends at."""
    layers, window = c["num_hidden_layers"], c.get("sliding_window") or 0
    kinds = c.get("layer_types")
    if kinds is None:
        pattern = count(c, "sliding_window_pattern") or layers + 1
        kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(layers)]
    return layers_by_type(kinds, layers, window)


def layers_by_type(kinds: Any, layers: int, window: int) -> list[int]:
    """Windows in the layers that layer_types names."""
    kinds = kinds_of_layers(kinds, layers, "sliding_attention")
    if "sliding_attention" in kinds and not window:
        raise UnsupportedError("layer_types has sliding_attention, but no sliding window is switched on")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def kinds_of_layers(kinds: Any, layers: int, *allowed: str) -> list[str]:
    """What layer_types has for each layer: full_attention, or one of the `allowed`."""
    known = isinstance(kinds, list) and all(kind in ("full_attention", *allowed) for kind in kinds)
    if not known or len(kinds) != layers:
        problem = f"{len(kinds)} entries for {layers} layers" if known else str(kinds)[:200]
        names = " or ".join(("full_attention", *allowed))
        raise UnsupportedError(f"layer_types is not understood: {problem}; each layer has {names}")
    return list(kinds)


def layers_with_rope(c: Settings) -> list[bool]:
    """no_rope_layers has a 1 for each layer that rotates; without it, or if it is empty, each
    no_rope_layer_interval-th does not."""
    flags, layers = c.get("no_rope_layers"), c["num_hidden_layers"]
    if flags is None or flags == []:
        interval = count(c, "no_rope_layer_interval") or layers + 1
        return [bool((n + 1) % interval) for n in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers or not all(value in (0, 1) for value in flags):
        raise UnsupportedError(f"no_rope_layers is not understood: {str(flags)[:100]}; each layer has 0 or 1")
    return [bool(value) for value in flags]


def count(c: Settings, key: str) -> int:
    value = c[key]
    if type(value) is not int or value < 0:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is not a number of layers")
    return value


def size_in(c: Settings, key: str) -> int:
    value = c[key]
    if type(value) is not int or not 0 < value <= _LARGEST_PART:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is not a size")
    return value


def positive(c: Settings, key: str) -> float:
    value = c[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is not a positive number")
    return float(value)


def _stretched(c: Settings) -> int:
    return context_length(c, c["max_model_len"]) or int(c["max_position_embeddings"])


def _cap(c: Settings, key: str) -> float:
    """0: none."""
    return 0.0 if c.get(key) is None else positive(c, key)
