"""Families of decoders with mixtures of experts, and beside them an expert that every token has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, Experts, LayerNorms, TensorNames
from penstock.engines.openvino.families_dense import exaone4, llama
from penstock.engines.openvino.families_experts import experts_of, granite_moe, in_groups, size_of_expert
from penstock.engines.openvino.families_kin import cohere, ernie4_5, hunyuan, sliding_granite
from penstock.engines.openvino.family import (
    Settings,
    all_but_every_nth,
    changed,
    count,
    family,
    filled,
    mixed,
    plain,
    positive,
    renamed,
    rotating,
    upper_layers,
    windowed,
)

_CORRECTION = "e_score_correction_bias"
_DEEPSEEK_NAMES = TensorNames(shared_expert="shared_experts", correction=f"gate.{_CORRECTION}")
_LEAST_SUM = 1e-20


@family("Glm4MoeForCausalLM", known=("use_qk_norm",))
def glm4_moe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    )
    norm = "each head" if c.get("use_qk_norm") else ""
    spec = plain(c, may_be_partial=True).with_attention(o_bias=False, qk_norm=norm)
    return like_deepseek(spec, c, behind_dense(c))


@family("Dots1ForCausalLM")
def dots1(c: Settings) -> DecoderSpec:
    """Windows in the layers that layer_types names, or in all from max_window_layers on."""
    c = filled(
        c,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        sliding_window=4096,
        max_window_layers=62,
        use_sliding_window=True,
        n_shared_experts=0,
        first_k_dense_replace=0,
        norm_topk_prob=False,
    )
    spec = windowed(plain(c).with_attention(qk_norm="each head"), upper_layers(c))
    return like_deepseek(spec, c, behind_dense(c))


@family("SolarOpenForCausalLM")
def solar_open(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1280,
        n_shared_experts=1,
        norm_topk_prob=True,
    )
    c = filled(c, intermediate_size=c["moe_intermediate_size"])
    return like_deepseek(plain(c).with_attention(o_bias=False), c, [True] * c["num_hidden_layers"])


@family("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")
def exaone_moe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        num_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    spec = exaone4(c).with_layers(norms=LayerNorms())
    spec = like_deepseek(spec, renamed(c, n_shared_experts="num_shared_experts"), sparse_layers(c))
    return replace(spec, names=replace(_DEEPSEEK_NAMES, correction=_CORRECTION))


@family("HYV3ForCausalLM")
def hy_v3(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=11158840.0,
        num_experts=192,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        num_shared_experts=1,
        first_k_dense_replace=1,
        router_scaling_factor=2.826,
    )
    spec = llama(c).with_attention(qk_norm="each head")
    c = changed(c, {"norm_topk_prob": True, "routed_scaling_factor": c["router_scaling_factor"]})
    spec = like_deepseek(spec, renamed(c, n_shared_experts="num_shared_experts"), sparse_layers(c))
    return replace(spec, names=TensorNames(router="router.gate", shared_expert="shared_mlp", correction="expert_bias"))


@family("Ernie4_5_MoeForCausalLM")
def ernie4_5_moe(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=4,
        moe_k=6,
        moe_num_experts=64,
        moe_intermediate_size=1536,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
        moe_norm_min=1e-12,
    )
    spec = ernie4_5(filled(c, head_dim=None))
    c = renamed(c, num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    c = renamed(c, n_shared_experts="moe_num_shared_experts")
    experts = experts_of(spec, c, size_of_expert(c, "moe_intermediate_size"), normalized=True)
    experts = replace(experts, least_sum=positive(c, "moe_norm_min"))
    names = replace(_DEEPSEEK_NAMES, correction=f"moe_statics.{_CORRECTION}")
    return replace(mixed(spec, with_share(experts, c), _ernie_layers(c)), names=names)


def _ernie_layers(c: Settings) -> list[bool]:
    layers, every, first = c["num_hidden_layers"], count(c, "moe_layer_interval"), count(c, "moe_layer_start_index")
    last = layers - 1 if c["moe_layer_end_index"] == -1 else count(c, "moe_layer_end_index")
    if not every:
        raise UnsupportedError("config.json has moe_layer_interval=0, which is not an interval of layers")
    return [(n + 1) % every == 0 and first <= n <= last for n in range(layers)]


@family("HunYuanMoEV1ForCausalLM")
def hunyuan_moe(c: Settings) -> DecoderSpec:
    """The shared expert has the size of the others."""
    c = filled(c, num_experts=1, moe_topk=1)
    spec = hunyuan(c)
    c = changed(c, {"num_experts": _everywhere(c, "num_experts"), "num_experts_per_tok": _everywhere(c, "moe_topk")})
    experts = experts_of(spec, c, c["intermediate_size"], normalized=True)
    names = replace(spec.names, router="gate.wg", shared_expert="shared_mlp")
    return replace(mixed(spec, replace(experts, shared=experts.expert, gated_share=False)), names=names)


def _everywhere(c: Settings, key: str) -> object:
    """What a list has for each layer, if it is the same."""
    value = c[key]
    if not isinstance(value, list):
        return value
    if len(value) != c["num_hidden_layers"] or len(set(map(str, value))) != 1:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}: layers that differ in this are not supported")
    return value[0]


@family("GraniteMoeSharedForCausalLM")
def granite_moe_shared(c: Settings) -> DecoderSpec:
    c = filled(c, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=0)
    return _with_shared_mlp(granite_moe(c), c)


@family("GraniteMoeSWAForCausalLM")
def granite_moe_swa(c: Settings) -> DecoderSpec:
    spec = sliding_granite(granite_moe_shared(c), c)
    names = replace(spec.names, router="block_sparse_moe.router", expert_down="down_proj")
    return replace(spec, names=names)


def _with_shared_mlp(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    if not c["shared_intermediate_size"]:
        return spec
    experts = spec.experts
    assert experts is not None
    shared = replace(experts.expert, intermediate_size=size_of_expert(c, "shared_intermediate_size"))
    return mixed(spec, replace(experts, shared=shared, gated_share=False))


@family("AfmoeForCausalLM")
def afmoe(c: Settings) -> DecoderSpec:
    """Layers with windows rotate, the others do not."""
    c = filled(
        c,
        head_dim=128,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        sliding_window=1024,
        global_attn_every_n_layers=4,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        num_shared_experts=2,
        num_dense_layers=1,
        route_scale=1.0,
        norm_topk_prob=True,
    )
    c = changed(
        c,
        {
            "sliding_window_pattern": c["global_attn_every_n_layers"],
            "n_shared_experts": c["num_shared_experts"],
            "first_k_dense_replace": c["num_dense_layers"],
            "routed_scaling_factor": c["route_scale"],
        },
    )
    spec = windowed(plain(c).with_attention(qk_norm="each head", gated=True), all_but_every_nth(c))
    spec = rotating(spec, c, [bool(window) for window in spec.windows])
    spec = like_deepseek(spec, c, behind_dense(c)).with_layers(norms=_AFMOE_NORMS)
    names = replace(spec.names, attention_gate="gate_proj", router="router.gate", correction="expert_bias")
    return replace(spec, names=names, embedding_scale=math.sqrt(spec.hidden_size) if c.get("mup_enabled") else 1.0)


_AFMOE_NORMS = LayerNorms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


@family("Cohere2MoeForCausalLM")
def cohere2_moe(c: Settings) -> DecoderSpec:
    """Layers with windows rotate, and dense ones in front if all of them lack a window."""
    c = filled(
        c,
        head_dim=128,
        num_experts=8,
        num_experts_per_tok=2,
        rope_theta=1e4,
        num_shared_experts=0,
        shared_expert_combination_strategy="average",
        expert_selection_fn="softmax",
        first_k_dense_replace=0,
        prefix_dense_sliding_window_pattern=1,
        prefix_dense_intermediate_size=None,
        sliding_window=4096,
        sliding_window_pattern=4,
        norm_topk_prob=True,
    )
    spec = cohere(changed(c, {"use_qk_norm": False}))
    spec = windowed(spec, _cohere2_windows(c))
    mixtures, dense = sparse_layers(c), c["prefix_dense_intermediate_size"]
    turns_dense = c["prefix_dense_sliding_window_pattern"] == 1
    kinds = zip(spec.windows, mixtures, strict=True)
    rotates = [bool(window) or (turns_dense and not has_experts) for window, has_experts in kinds]
    experts = _cohere2_experts(spec, c)
    if dense is not None:
        spec = spec.with_mlp(intermediate_size=size_of_expert(c, "prefix_dense_intermediate_size"))
    spec = mixed(rotating(spec, c, rotates), experts, mixtures)
    if c.get("rms_norm_eps") is not None:
        spec = replace(spec, norm="rms", norm_eps=positive(c, "rms_norm_eps"))
    return replace(spec, names=TensorNames(shared_expert="shared_experts"))


def _cohere2_windows(c: Settings) -> list[int]:
    """Dense layers in front have a pattern of their own."""
    if c.get("layer_types") is not None:
        return all_but_every_nth(c)
    layers = c["num_hidden_layers"]
    dense = min(count(c, "first_k_dense_replace"), layers)
    first = {"sliding_window_pattern": c["prefix_dense_sliding_window_pattern"], "num_hidden_layers": dense}
    return all_but_every_nth({**c, **first}) + all_but_every_nth({**c, "num_hidden_layers": layers - dense})


def _cohere2_experts(spec: DecoderSpec, c: Settings) -> Experts:
    scores, strategy = c["expert_selection_fn"], c["shared_expert_combination_strategy"]
    if scores not in ("softmax", "sigmoid") or strategy not in ("sum", "average"):
        raise UnsupportedError(
            "config.json's expert_selection_fn or shared_expert_combination_strategy is not understood:"
            f" {str(scores)[:50]}, {str(strategy)[:50]}"
        )
    normalized = scores == "softmax" or bool(c["norm_topk_prob"])
    experts = replace(experts_of(spec, c, c["intermediate_size"], normalized=normalized), scores=scores)
    experts = with_share(experts, renamed(c, n_shared_experts="num_shared_experts"))
    halves = experts.shared is not None and strategy == "average"
    return replace(experts, scale=0.5, shared_scale=0.5) if halves else experts


def like_deepseek(spec: DecoderSpec, c: Settings, layers: Sequence[bool]) -> DecoderSpec:
    """Sigmoids are weights; corrected, they choose. `layers`: those with experts."""
    c = filled(c, routed_scaling_factor=1.0)
    size = size_of_expert(c, "moe_intermediate_size")
    number = c.get("n_routed_experts") or c.get("num_experts")
    experts = experts_of(spec, {**c, "num_experts": number}, size, normalized=bool(c["norm_topk_prob"]))
    experts = replace(experts, scores="sigmoid", least_sum=_LEAST_SUM, scale=positive(c, "routed_scaling_factor"))
    experts = in_groups(experts, c, 2)
    further = count(filled(c, num_nextn_predict_layers=0), "num_nextn_predict_layers")
    spec = mixed(spec, with_share(experts, c), layers)
    return replace(spec, names=_DEEPSEEK_NAMES, further_layers=further)


def with_share(experts: Experts, c: Settings) -> Experts:
    """With an expert for every token, of the size of several."""
    number = count(c, "n_shared_experts")
    if not number:
        return experts
    size = size_of_expert({"size": number * experts.expert.intermediate_size}, "size")
    return replace(experts, shared=replace(experts.expert, intermediate_size=size), gated_share=False)


def behind_dense(c: Settings) -> list[bool]:
    """Layers that have experts: all but the first few."""
    dense = count(c, "first_k_dense_replace")
    return [n >= dense for n in range(c["num_hidden_layers"])]


def sparse_layers(c: Settings) -> list[bool]:
    """Layers that mlp_layer_types calls sparse; without it, as `behind_dense`."""
    kinds = c.get("mlp_layer_types")
    if kinds is None:
        return behind_dense(c)
    known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not known or len(kinds) != c["num_hidden_layers"]:
        raise UnsupportedError(f"mlp_layer_types is not understood: {str(kinds)[:100]}; each layer is dense or sparse")
    return [kind == "sparse" for kind in kinds]
