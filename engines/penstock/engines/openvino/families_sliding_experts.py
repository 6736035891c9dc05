"""Families of decoders with mixtures of experts, whose layers with a window differ from those without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import Attention, DecoderSpec, TensorNames
from penstock.engines.openvino.families_experts import experts_of, layers_with_experts, size_of_expert
from penstock.engines.openvino.families_shared_experts import like_deepseek, sparse_layers
from penstock.engines.openvino.family import (
    Settings,
    changed,
    changed_layers,
    family,
    filled,
    layers_by_type,
    mixed,
    plain,
    positive,
    rotated_by_window,
    rotating,
    size_in,
    windowed,
)
from penstock.engines.openvino.rope import parse_ropes_of_layer_types

_BASES = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}


@family("FlintForCausalLM")
def flint(c: Settings) -> DecoderSpec:
    """Layers with windows rotate, the others do not. Sigmoids choose, without a correction."""
    c = filled(
        c,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=262144,
        sliding_window=513,
        num_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=1024,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[0, 1],
    )
    spec = plain(c).with_attention(qk_norm="each head", sinks=True)
    last = spec.num_layers - 1
    whole = [n < 2 or n % 4 == 1 or n == last for n in range(spec.num_layers)]
    spec = windowed(spec, _windows(c, ["full_attention" if full else "sliding_attention" for full in whole]))
    spec = rotating(spec, c, [bool(window) for window in spec.windows])
    size = size_of_expert(c, "moe_intermediate_size")
    experts = experts_of(spec, c, size, normalized=bool(c["norm_topk_prob"]))
    shared = replace(experts.expert, intermediate_size=size_of_expert(c, "shared_expert_intermediate_size"))
    experts = replace(experts, scores="sigmoid", shared=shared, gated_share=False)
    return replace(mixed(spec, experts, layers_with_experts(c)), names=TensorNames(sinks="softmax_offset"))


@family("MellumForCausalLM")
def mellum(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        sliding_window=1024,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=896,
        norm_topk_prob=True,
        first_k_dense_replace=0,
    )
    spec = _rotated_by_kind(plain(c, rotates=False).with_attention(qk_norm="each head"), c, _BASES)
    size = size_of_expert(c, "moe_intermediate_size")
    experts = experts_of(spec, c, size, normalized=bool(c["norm_topk_prob"]))
    return mixed(spec, experts, sparse_layers(c))


@family("MiMoV2FlashForCausalLM")
def mimo_v2_flash(c: Settings) -> DecoderSpec:
    """Layers with windows have sinks, and twice as many heads of keys and values. Values are narrower than keys."""
    c = filled(
        c,
        num_key_value_heads=4,
        head_dim=192,
        v_head_dim=128,
        max_position_embeddings=262144,
        sliding_window=129,
        rms_norm_eps=1e-5,
        attention_value_scale=0.707,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        norm_topk_prob=True,
        first_k_dense_replace=1,
    )
    if c.get("sliding_window_size") is not None:
        c = changed(c, {"sliding_window": size_in(c, "sliding_window_size") + 1})
    spec = plain(c, rotates=False).with_attention(o_bias=False)
    kinds = [_KINDS[n > 0 and (n + 1) % 6 > 0] for n in range(spec.num_layers)]
    bases = {"full_attention": {"rope_theta": 5e6}, "sliding_attention": {"rope_theta": 1e4}}
    spec = _rotated_by_kind(spec, c, {kind: {**rope, **_MIMO_PART} for kind, rope in bases.items()}, kinds)
    spec = changed_layers(spec, [_mimo_attention(layer, c) for layer in spec.attention.values()])
    spec = like_deepseek(spec, {**c, "n_shared_experts": 0}, sparse_layers(c))
    return replace(spec, names=replace(spec.names, sinks="attention_sink_bias"))


def _mimo_attention(layer: Attention, c: Settings) -> dict[str, Any]:
    scale = 1.0 if c["attention_value_scale"] is None else positive(c, "attention_value_scale")
    value_size = size_in(c, "v_head_dim")
    kv_heads = layer.num_kv_heads * (2 if layer.window else 1)
    if value_size > layer.head_dim or layer.num_heads % kv_heads:
        raise UnsupportedError(
            f"{layer.num_heads} heads of size {layer.head_dim} on {kv_heads}, values of {value_size}: they do not fit"
        )
    return {"num_kv_heads": kv_heads, "value_size": value_size, "value_scale": scale, "sinks": bool(layer.window)}


_KINDS = ("full_attention", "sliding_attention")
_MIMO_PART = {"partial_rotary_factor": 0.334}


def _rotated_by_kind(
    spec: DecoderSpec, c: Settings, defaults: Mapping[str, Mapping[str, Any]], kinds: list[str] | None = None
) -> DecoderSpec:
    """With windows, and rotations of each kind of layer. `kinds`: of the layers, if layer_types does not say."""
    spec = windowed(spec, _windows(c, kinds or [_KINDS[0]] * spec.num_layers))
    ropes = parse_ropes_of_layer_types(c, spec.attention[0].head_dim, defaults, may_be_partial=True)
    return rotated_by_window(spec, c, ropes)


def _windows(c: Settings, kinds: list[str]) -> list[int]:
    return layers_by_type(c.get("layer_types") or kinds, c["num_hidden_layers"], c.get("sliding_window") or 0)
