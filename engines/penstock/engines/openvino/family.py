"""What distinguishes one family of decoders from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.openvino.decoder_spec import (
    Experts,
    LayerNorms,
    NormKind,
    QKNorm,
    QKVRows,
    QueryGrowth,
    TensorNames,
)
from penstock.engines.openvino.layer_kinds import every_layer_rotates, one_rope
from penstock.engines.openvino.rope import Rope


@dataclass(frozen=True)
class Family:
    """How one architecture reads its config.json."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a key means when config.json leaves it out, where the family's own default matters."""
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda c: {}
    """Settings that the family has under names of its own, by their usual names."""
    sliding_windows: Callable[[Mapping[str, Any]], list[int]] = lambda c: [0] * c["num_hidden_layers"]
    ropes: Callable[[Mapping[str, Any], int], tuple[Rope, Rope]] = one_rope
    """Of layers that attend to all tokens, and of layers with a window; the int is head_dim."""
    activation_key: str = "hidden_act"
    eps_key: str = "rms_norm_eps"
    query_scale: Callable[[Mapping[str, Any], int], float] = lambda c, head_dim: head_dim**-0.5
    embedding_scale: Callable[[Mapping[str, Any]], float] = lambda c: 1.0
    norms: Callable[[Mapping[str, Any]], LayerNorms] = lambda c: LayerNorms()
    norm: NormKind = "rms"
    norm_offset: float = 0.0
    qkv_bias: Callable[[Mapping[str, Any]], bool] = lambda c: bool(c.get("attention_bias"))
    o_bias: Callable[[Mapping[str, Any]], bool] = lambda c: bool(c.get("attention_bias"))
    mlp_bias: Callable[[Mapping[str, Any]], bool] = lambda c: False
    qk_norm: Callable[[Mapping[str, Any]], QKNorm] = lambda c: ""
    rotates: Callable[[Mapping[str, Any], list[int]], list[bool]] = every_layer_rotates
    """For each layer, whether queries and keys are rotated; the list has the windows."""
    residual_scale: Callable[[Mapping[str, Any]], float] = lambda c: 1.0
    logits_scale: Callable[[Mapping[str, Any]], float] = lambda c: 1.0
    names: TensorNames = field(default_factory=TensorNames)
    qkv_rows: QKVRows = "whole"
    alternating_pairs: bool = False
    query_growth: Callable[[Mapping[str, Any]], QueryGrowth | None] = lambda c: None
    parallel: Callable[[Mapping[str, Any]], bool] = lambda c: False
    gated: bool = True
    transposed: bool = False
    alibi: bool = False
    sinks: bool = False
    head_bias: bool = False
    experts: Callable[[Mapping[str, Any]], Experts | None] = lambda c: None
    caps: bool = False
    """It may cap scores of attention and logits."""
