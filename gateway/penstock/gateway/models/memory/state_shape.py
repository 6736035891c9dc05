"""The recurrent states of a hybrid model, by its config.json: how many numbers a request has of them, in which layers.

Keys are those of transformers' configs: LFM2's convolutions, gated delta nets (Qwen3.5, Qwen3-Next, OLMo Hybrid), and
Mamba-2 by the names of Granite 4, Bamba and Falcon-H1, and by those of Nemotron-H.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ATTENDING = {"full_attention", "attention", "hybrid"}
_RECURRENT = {"linear_attention", "mamba", "conv", "hybrid"}
_OF_PATTERN = {"M": "linear_attention", "*": "full_attention"}
"""Letters of Nemotron-H's hybrid_override_pattern; others stand for layers that keep nothing."""


@dataclass(frozen=True, slots=True)
class StateShape:
    attending: int
    """Layers that keep keys and values."""
    convolved: int
    """Numbers of a request, in the precision of the computation: the last inputs of convolutions."""
    summed: int
    """Numbers of a request that are sums over all tokens; torch keeps these in f32."""


def read_states(config: Mapping[str, Any]) -> StateShape | None:
    """None: it has no recurrent layers, or some that are not known. Raises KeyError or TypeError for settings that lack
    what such a layer needs."""
    layer = _numbers_of_layer(config)
    kinds = None if layer is None else _layer_kinds(config)
    if layer is None or not kinds or not _RECURRENT.intersection(kinds):
        return None
    convolved, summed = layer
    count = sum(kind in _RECURRENT for kind in kinds)
    return StateShape(sum(kind in _ATTENDING for kind in kinds), count * convolved, count * summed)


def num_layers(config: Mapping[str, Any]) -> int:
    """As config.json says, or as many as it has kinds of them (Nemotron-H)."""
    count: int | None = config.get("num_hidden_layers")
    return len(_layer_kinds(config)) if count is None else count


def _numbers_of_layer(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """`convolved` and `summed` of one recurrent layer."""
    if config.get("conv_L_cache"):
        return config["hidden_size"] * config["conv_L_cache"], 0
    if config.get("linear_num_value_heads"):
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return (2 * keys + values) * config["linear_conv_kernel_dim"], values * config["linear_key_head_dim"]
    names: tuple[str, ...]
    if config.get("mamba_n_heads"):
        names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    elif config.get("mamba_num_heads"):
        older = (("mamba_n_groups", "n_groups"), ("mamba_d_conv", "conv_kernel"))
        kept = (name if name in config else usual for name, usual in older)
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", *kept)
    else:
        return None
    if config.get("mamba_d_head") == "auto":
        inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
        config = {**config, "mamba_d_head": inner // config["mamba_n_heads"]}
    heads, size, state, groups, kernel = (config[name] for name in names)
    return (heads * size + 2 * groups * state) * kernel, heads * size * state


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Of all layers; empty where nothing says so."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds:
        return list(kinds)
    if config.get("hybrid_override_pattern"):
        return [_OF_PATTERN.get(letter, "none") for letter in config["hybrid_override_pattern"]]
    count = config["num_hidden_layers"]
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * count
    attending = config.get("full_attn_idxs") or config.get("attn_layer_indices")
    if attending is None and config.get("full_attention_interval"):
        interval = config["full_attention_interval"]
        attending = range(interval - 1, count, interval)
    if attending is None:
        return []
    return ["full_attention" if number in set(attending) else "linear_attention" for number in range(count)]
